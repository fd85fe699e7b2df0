#include "fsdp/unit/unit_buffers.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include <torch/torch.h>

#include "tessera/error.h"
#include "tessera/unit_controls.h"
#include "torch/device.h"

namespace tessera {
namespace {

// A weak reference keeps the address of a tensor that has died from being another one's.
struct NotPersistent {
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
  std::set<std::string> names;
};

struct NotPersistentBuffers {
  std::shared_mutex mutex;
  std::atomic<std::size_t> count{0};  // programs without such buffers pay one load
  std::unordered_map<const c10::TensorImpl*, NotPersistent> entries;
  std::size_t sweep_at = 16;
};

NotPersistentBuffers& not_persistent() {
  static NotPersistentBuffers instance;
  return instance;
}

// With the lock.
void forget_dead(NotPersistentBuffers& all) {
  if (all.entries.size() < all.sweep_at) return;
  std::erase_if(all.entries, [](const auto& entry) { return entry.second.tensor.expired(); });
  all.sweep_at = std::max<std::size_t>(16, 2 * all.entries.size());
}

torch::Tensor buffer_of(const torch::nn::Module& module, const std::string& name) {
  const auto buffers = module.named_buffers(/*recurse=*/false);
  if (const auto* found = buffers.find(name)) return *found;
  throw Error(ErrorCode::not_found, module.name() + " has no buffer of this name").at_key(name);
}

}  // namespace

void detail::set_persistent(const at::Tensor& buffer, const std::string& name, bool persistent) {
  if (!buffer.defined()) return;
  auto& all = not_persistent();
  const std::unique_lock lock(all.mutex);
  const auto* key = buffer.unsafeGetTensorImpl();
  if (!persistent) {
    forget_dead(all);
    auto& entry =
        all.entries
            .try_emplace(
                key, NotPersistent{decltype(NotPersistent::tensor)(buffer.getIntrusivePtr()), {}})
            .first->second;
    entry.names.insert(name);
  } else if (const auto found = all.entries.find(key); found != all.entries.end()) {
    found->second.names.erase(name);
    if (found->second.names.empty()) all.entries.erase(found);
  }
  all.count.store(all.entries.size(), std::memory_order_release);
}

bool detail::is_persistent(const at::Tensor& buffer, const std::string& name) {
  auto& all = not_persistent();
  if (!buffer.defined() || all.count.load(std::memory_order_acquire) == 0) return true;
  const std::shared_lock lock(all.mutex);
  const auto found = all.entries.find(buffer.unsafeGetTensorImpl());
  return found == all.entries.end() || !found->second.names.contains(name);
}

std::size_t detail::not_persistent_buffers() {
  return not_persistent().count.load(std::memory_order_acquire);
}

torch::Tensor& register_buffer(torch::nn::Module& module, const std::string& name,
                               const torch::Tensor& tensor, bool persistent) {
  auto& registered = module.register_buffer(name, tensor);
  detail::set_persistent(registered, name, persistent);
  return registered;
}

void set_persistent(torch::nn::Module& module, const std::string& name, bool persistent) {
  detail::set_persistent(buffer_of(module, name), name, persistent);
}

bool is_persistent(const torch::nn::Module& module, const std::string& name) {
  return detail::is_persistent(buffer_of(module, name), name);
}

}  // namespace tessera

namespace tessera::detail {

at::ScalarType UnitBuffers::wanted_type(const at::Tensor& buffer) const {
  return dtype_ && buffer.is_floating_point() ? *dtype_ : buffer.scalar_type();
}

void UnitBuffers::place() {
  for (const auto& buffer : all_) {
    const auto own = buffer.scalar_type();
    const auto wanted = wanted_type(buffer);
    if (wanted != own) cast_.emplace_back(buffer, own);
    if (wanted != own || buffer.device() != device_)
      replace_data(buffer, buffer.to(device_, wanted));
  }
}

void UnitBuffers::use_own_dtype(bool own) {
  if (std::exchange(has_own_dtype_, own) == own) return;
  for (const auto& [buffer, type] : cast_) buffer.set_data(buffer.to(own ? type : *dtype_));
}

}  // namespace tessera::detail
