// ModuleRef: a module, in whatever way the caller holds it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>

namespace [[gnu::visibility("default")]] tessera {

// Functions make it from their argument and do not keep it, because it does not own the module.
class ModuleRef {
 public:
  ModuleRef(const torch::nn::Module& module) : module_(module) {}  // NOLINT(*-explicit-*)
  template <typename Impl>
  ModuleRef(const torch::nn::ModuleHolder<Impl>& holder)  // NOLINT(*-explicit-*)
      : module_(*holder.ptr()) {}
  template <typename Impl>
  ModuleRef(const std::shared_ptr<Impl>& module)  // NOLINT(*-explicit-*)
      : module_(*module) {}

  [[nodiscard]] const torch::nn::Module& get() const noexcept { return module_; }

 private:
  const torch::nn::Module& module_;
};

}  // namespace tessera
