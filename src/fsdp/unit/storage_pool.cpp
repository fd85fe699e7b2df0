#include "fsdp/unit/storage_pool.h"

#include <torch/torch.h>

namespace tessera::detail {

at::Tensor StoragePool::make_like(const at::Tensor& array) {
  if (array.is_meta()) return at::empty_like(array);  // a shape, without memory
  auto& model = *array.storage().unsafeGetStorageImpl();
  const auto bytes = model.nbytes();
  c10::DataPtr memory;
  for (auto block = blocks_.begin(); block != blocks_.end(); ++block) {
    if (block->first != bytes || block->second.device() != model.device()) continue;
    memory = std::move(block->second);
    blocks_.erase(block);
    break;
  }
  if (!memory) memory = model.allocator()->allocate(bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), model.allocator(),
                       /*resizable=*/false);
  return at::empty({0}, array.options()).set_(std::move(storage), 0, array.sizes(), {});
}

void StoragePool::take(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  auto memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  // Blocks of a CUDA device stay with libtorch's own caching allocator.
  if (memory.device().is_cpu() && blocks_.size() < kKept)
    blocks_.emplace_back(bytes, std::move(memory));
}

}  // namespace tessera::detail
