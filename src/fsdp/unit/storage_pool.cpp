#include "fsdp/unit/storage_pool.h"

#include <torch/torch.h>

#include <algorithm>

namespace tessera::detail {

at::Tensor StoragePool::make_like(const at::Tensor& array) {
  if (array.is_meta()) return at::empty_like(array);  // a shape, without memory
  auto& model = *array.storage().unsafeGetStorageImpl();
  const auto bytes = model.nbytes();
  auto memory = reuse(model);
  if (!memory) memory = model.allocator()->allocate(bytes);
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), model.allocator(),
                       /*resizable=*/false);
  return at::empty({0}, array.options()).set_(std::move(storage), 0, array.sizes(), {});
}

c10::DataPtr StoragePool::reuse(const c10::StorageImpl& model) {
  const auto block = std::ranges::find_if(blocks_, [&](const auto& one) {
    return one.first == model.nbytes() && one.second.device() == model.device();
  });
  if (block == blocks_.end()) return {};
  auto memory = std::move(block->second);
  blocks_.erase(block);
  return memory;
}

void StoragePool::take(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  auto memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  // Blocks of a CUDA device stay with libtorch's own caching allocator.
  if (memory.device().is_cpu() && blocks_.size() < kKept)
    blocks_.emplace_back(bytes, std::move(memory));
}

}  // namespace tessera::detail
