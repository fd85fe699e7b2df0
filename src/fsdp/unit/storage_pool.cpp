#include "fsdp/unit/storage_pool.h"

#include <torch/torch.h>

#include <algorithm>

namespace tessera::detail {
namespace {

const SideStream& stream_of(std::optional<SideStream>& stream, at::Device device) {
  if (!stream || stream->stream().device() != device) stream.emplace(device);
  return *stream;
}

}  // namespace

at::Tensor StoragePool::make_like(const at::Tensor& array) {
  if (array.is_meta()) return at::empty_like(array);  // a shape, without memory
  auto& model = *array.storage().unsafeGetStorageImpl();
  const auto bytes = model.nbytes();
  auto memory = reuse(model);
  if (!memory) {
    memory = model.allocator()->allocate(bytes);
    // The allocator has it from kernels that the current stream has yet to run.
    follow_current();
  }
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, std::move(memory), model.allocator(),
                       /*resizable=*/false);
  return at::empty({0}, array.options()).set_(std::move(storage), 0, array.sizes(), {});
}

c10::DataPtr StoragePool::reuse(const c10::StorageImpl& model) {
  const auto block = std::ranges::find_if(blocks_, [&](const auto& one) {
    return one.bytes == model.nbytes() && one.memory.device() == model.device();
  });
  if (block == blocks_.end()) return {};
  if (block->last_use && gathers_) block->last_use->block(gathers_->stream());
  auto memory = std::move(block->memory);
  blocks_.erase(block);
  return memory;
}

void StoragePool::take(c10::StorageImpl& storage) {
  const auto bytes = storage.nbytes();
  auto memory = storage.set_data_ptr(c10::DataPtr(nullptr, storage.device()));
  const auto device = memory.device();
  if (!memory || device.is_meta() || blocks_.size() >= kKept) return;
  Block block{bytes, std::move(memory), std::nullopt};
  if (!device.is_cpu()) block.last_use = mark_current(device);
  blocks_.push_back(std::move(block));
}

const SideStream& StoragePool::gathers(at::Device device) {
  return stream_of(gathers_, device);
}

const SideStream& StoragePool::sums(at::Device device) {
  return stream_of(sums_, device);
}

void StoragePool::follow_current() {
  if (gathers_) gathers_->follow_current();
}

}  // namespace tessera::detail
