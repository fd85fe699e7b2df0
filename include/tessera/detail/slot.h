// Slots of torch::nn::Sequential, which call modules without a holder. Internal; see
// tessera/fsdp.h.
#pragma once

#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/container/moduledict.h>
#include <torch/nn/modules/container/modulelist.h>

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/detail/call.h"
#include "tessera/shard_options.h"

namespace [[gnu::visibility("default")]] tessera {
namespace detail {

// What a Sequential slot holds for a module that is a unit: torch's own holder, but its calls of
// forward are seen.
template <typename Impl, typename Result, typename... Arguments>
class UnitSlot : public torch::nn::AnyModuleHolder<Impl, Arguments...> {
 public:
  using Base = torch::nn::AnyModuleHolder<Impl, Arguments...>;
  using Base::Base;

  torch::nn::AnyValue forward(std::vector<torch::nn::AnyValue>&& arguments) override {
    auto unit = find_unit(this->module.get());
    if (!unit) return Base::forward(std::move(arguments));
    if constexpr (!TensorsOf<Result>::known) throw_unknown_result(*unit, typeid(Result));
    Call scope(std::move(unit));
    try {
      std::vector<at::Tensor*> tensors;
      std::size_t i = 0;
      (collect<std::decay_t<Arguments>>(arguments, i++, tensors), ...);
      scope.enter(tensors);
      torch::nn::AnyValue result = Base::forward(std::move(arguments));
      tensors.clear();
      collect_tensors(*result.template try_get<Result>(), tensors);
      scope.leave(tensors);
      return result;
    } catch (...) {
      scope.explain(std::current_exception());
    }
  }
  std::unique_ptr<torch::nn::AnyModulePlaceholder> copy() const override {
    return std::make_unique<UnitSlot>(*this);
  }

 private:
  // Base::forward judges arguments that are missing or of another type.
  template <typename Argument>
  static void collect(std::vector<torch::nn::AnyValue>& arguments, std::size_t index,
                      std::vector<at::Tensor*>& into) {
    if (index >= arguments.size()) return;
    if (auto* value = arguments[index].template try_get<Argument>()) collect_tensors(*value, into);
  }
};

// Makes the holder of a slot for one module.
using SlotMaker = std::function<std::unique_ptr<torch::nn::AnyModulePlaceholder>()>;

template <typename Impl, typename Class, typename Result, typename... Arguments>
SlotMaker slot_maker_for(std::weak_ptr<Impl> module, Result (Class::*)(Arguments...)) {
  return [module = std::move(module)]() -> std::unique_ptr<torch::nn::AnyModulePlaceholder> {
    return std::make_unique<UnitSlot<Impl, std::decay_t<Result>, Arguments...>>(module.lock());
  };
}

// Whether a Sequential can call it: it hands values over, and keeps what comes back.
template <typename Class, typename Result, typename... Arguments>
constexpr bool fits_slot(Result (Class::*)(Arguments...)) {
  return std::is_copy_constructible_v<std::decay_t<Result>> &&
         ((std::is_copy_constructible_v<std::decay_t<Arguments>> &&
           std::is_convertible_v<std::decay_t<Arguments>&&, Arguments>)&&...);
}

// Null for a module that no Sequential can hold: its forward is overloaded or a template, returns
// nothing, or takes a reference to change what it is given.
template <typename Impl>
SlotMaker make_slot_maker(const std::shared_ptr<Impl>& module) {
  if constexpr (requires { requires fits_slot(&Impl::forward); }) {
    return slot_maker_for<Impl>(std::weak_ptr<Impl>(module), &Impl::forward);
  } else {
    return nullptr;
  }
}

template <typename Impl>
inline constexpr bool kHasForward = !std::is_same_v<Impl, torch::nn::ModuleListImpl> &&
                                    !std::is_same_v<Impl, torch::nn::ModuleDictImpl>;

template <typename Impl>
constexpr void check_has_forward() {
  static_assert(kHasForward<Impl>,
                "fully_shard does not support containers that do not implement forward");
  static_assert(!std::is_same_v<Impl, torch::nn::Module>,
                "fully_shard needs the module's own type: pass its holder or shared_ptr<NameImpl>");
}

struct UnitModule {
  std::shared_ptr<torch::nn::Module> module;
  SlotMaker slot_maker = nullptr;
};

// A holder or a shared_ptr of a module.
template <typename Impl>
std::shared_ptr<Impl> pointer_of(const std::shared_ptr<Impl>& module) {
  return module;
}
template <typename Impl>
std::shared_ptr<Impl> pointer_of(const torch::nn::ModuleHolder<Impl>& module) {
  return module.ptr();
}
template <typename Module>
concept AnyModulePointer = requires(const Module& module) {
  pointer_of(module);
};

// What stands where options may stand, and is how a module is called.
template <typename Call>
concept NoOptions =
    !std::is_convertible_v<Call, ShardOptions> && !std::is_convertible_v<Call, ReplicateOptions>;

// Makes one unit of the modules, without those that another one of them contains.
void shard_modules(std::vector<UnitModule> modules, const UnitSpec& spec);

}  // namespace detail
}  // namespace tessera
