// Calls of sharded modules that the runtime sees, so that it may gather before and free after.
//
//   struct BlockImpl : torch::nn::Module { torch::Tensor forward(torch::Tensor x); };
//   TESSERA_MODULE(Block);          // block(x) is seen
//   torch::nn::Linear plain(4, 4);
//   call_module(plain, x);          // of any module
//
// Modules that are no unit are called as without this. fsdp.h includes it.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <memory>
#include <utility>

#include "tessera/detail/call.h"
#include "tessera/detail/slot.h"

namespace [[gnu::visibility("default")]] tessera {

// A module as fully_shard and replicate take it: a holder or a shared_ptr of its class, which has
// forward. Callers pass either; they need not name this class.
class UnitMember {
 public:
  template <typename Impl>
  UnitMember(const std::shared_ptr<Impl>& module)  // NOLINT(*-explicit-*)
      : module_{module, detail::make_slot_maker(module)} {
    detail::check_has_forward<Impl>();
  }
  template <typename Impl>
  UnitMember(const torch::nn::ModuleHolder<Impl>& module)  // NOLINT(*-explicit-*)
      : UnitMember(module.ptr()) {}
  // One that no Sequential calls, see CalledModule.
  explicit UnitMember(detail::UnitModule module) : module_(std::move(module)) {}
  [[nodiscard]] const detail::UnitModule& module() const noexcept { return module_; }

 private:
  detail::UnitModule module_;
};

// Calls module.forward(arguments...), with the steps of its unit before and after if it has one.
// `module` is a holder or an Impl. Returns what forward returns.
template <typename Module, typename... Arguments>
decltype(auto) call_module(Module&& module, Arguments&&... arguments) {
  return detail::call_module(detail::impl_of(module), std::forward<Arguments>(arguments)...);
}

// The same for a method other than forward: call_method(&GptImpl::encode, model, tokens). In
// PyTorch register_fsdp_forward_method is for this.
template <typename Method, typename Module, typename... Arguments>
decltype(auto) call_method(Method method, Module&& module, Arguments&&... arguments) {
  return detail::call_with(method, detail::impl_of(module), std::forward<Arguments>(arguments)...);
}

// The calls of a module whose class is not made for this: one that cannot be changed, has no
// forward, or is known as a torch::nn::Module alone. `call` is how it is called, a function of the
// module and the arguments or a member function. What it calls inside may be anything, because the
// unit that is gathered is the module as a whole:
//
//   auto act = fully_shard(policy, mesh, [](PolicyImpl& policy, const torch::Tensor& seen) {
//     return policy.act(seen, /*explore=*/true);
//   });
//   auto loss = loss_of(act(seen));                   // instead of policy->act(seen, true)
//   AdamW optimizer(sharded_parameters(act.module()));
//
// A small handle; copies share the module. What `call` changes in its arguments has to show in its
// parameters: a generic function that changes one throws `unsupported`.
template <typename Impl, typename Call>
class CalledModule {
 public:
  CalledModule(std::shared_ptr<Impl> module, Call call)
      : module_(std::move(module)), call_(std::move(call)) {
    detail::require_module(module_.holder().get());
    module_.take_units();
  }
  template <typename... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) {
    return detail::call_with(call_, *module_.holder(), std::forward<Arguments>(arguments)...);
  }
  template <typename... Arguments>
  decltype(auto) operator()(Arguments&&... arguments) const {
    return detail::call_with(call_, *module_.holder(), std::forward<Arguments>(arguments)...);
  }
  [[nodiscard]] const std::shared_ptr<Impl>& module() const noexcept { return module_.holder(); }

 private:
  detail::WrappedModule<std::shared_ptr<Impl>> module_;
  Call call_;
};

// A holder whose calls are seen, and the last of which ends its module's units. Else it is torch's.
template <typename Impl>
class ModuleHolder : public detail::holders::OwningHolder<Impl> {
 public:
  using detail::holders::OwningHolder<Impl>::OwningHolder;
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments)
      -> torch::detail::return_type_of_forward_t<Impl, Arguments...> {
    return call_module(*this, std::forward<Arguments>(arguments)...);
  }
};

}  // namespace tessera

// Defines class `Name`, the holder of `NameImpl`. Use it instead of TORCH_MODULE(Name).
#define TESSERA_MODULE_IMPL(Name, ImplType)                                                        \
  class Name : public ::tessera::ModuleHolder<ImplType> { /* NOLINT(bugprone-macro-parentheses) */ \
   public:                                                                                         \
    using ::tessera::ModuleHolder<ImplType>::ModuleHolder;                                         \
    Name() = default;                                                                              \
  }
#define TESSERA_MODULE(Name) TESSERA_MODULE_IMPL(Name, Name##Impl)
