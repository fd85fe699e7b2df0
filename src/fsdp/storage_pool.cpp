#include "fsdp/storage_pool.h"

namespace tessera::detail {

void StoragePool::give(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->first != bytes || block->second.device() != storage.device()) continue;
    storage.set_data_ptr_noswap(std::move(block->second));
    blocks_.erase(block);
    return;
  }
  storage.set_data_ptr_noswap(storage.allocator()->allocate(bytes));
}

void StoragePool::take(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  auto memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  // Blocks of a CUDA device stay with libtorch's own caching allocator.
  if (memory.device().is_cpu() && blocks_.size() < kKept)
    blocks_.emplace_back(bytes, std::move(memory));
}

}  // namespace tessera::detail
