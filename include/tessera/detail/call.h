// What a call of a sharded module does around forward. Internal; see tessera/fsdp.h.
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstddef>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <vector>

#include "tessera/detail/carried.h"
#include "tessera/detail/tensors_of.h"

namespace [[gnu::visibility("default")]] tessera {
namespace detail {

class Unit;

// The unit that fully_shard made of `module`; null when there is none.
[[nodiscard]] std::shared_ptr<Unit> find_unit(const torch::nn::Module* module);

// The units at and below a module. When this goes after the module, what they held goes with it:
// nobody else is told of a module's death. Units of modules that others held than a TESSERA_MODULE
// holder or a wrapper go with the next pass over their mesh, the next fully_shard, or the last
// handle of the mesh; if that has gone before, they stay.
class UnitsOf {
 public:
  UnitsOf() = default;
  explicit UnitsOf(const torch::nn::Module& module);
  UnitsOf(const UnitsOf&) = default;
  UnitsOf(UnitsOf&&) = default;
  UnitsOf& operator=(const UnitsOf&) = default;
  UnitsOf& operator=(UnitsOf&&) = default;
  ~UnitsOf();

 private:
  std::vector<std::weak_ptr<Unit>> units_;
};

// A wrapper's module, behind a holder, and its units, which go after it.
template <typename Holder>
class WrappedModule {
 public:
  explicit WrappedModule(Holder module) : module_(std::move(module)) {}
  WrappedModule(const WrappedModule&) = default;
  WrappedModule(WrappedModule&&) = default;
  // What was there before goes as in the destructor.
  WrappedModule& operator=(WrappedModule other) noexcept {
    std::swap(units_, other.units_);
    std::swap(module_, other.module_);
    return *this;
  }
  ~WrappedModule() = default;

  // Once they are made.
  void take_units() { units_ = UnitsOf(*module_); }
  [[nodiscard]] Holder& holder() noexcept { return module_; }
  [[nodiscard]] const Holder& holder() const noexcept { return module_; }

 private:
  UnitsOf units_;
  Holder module_;
};

// Throws an Error: the tensors of a forward's result must be found to prepare the backward.
[[noreturn]] void throw_unknown_result(const Unit& unit, const std::type_info& result);

// Throws `invalid_argument` for a null pointer.
void require_module(const torch::nn::Module* module);

// One call of one unit's module: enter, forward, leave. An exception that ends it ends what the
// unit had under way; where it ends the outermost call, the model needs a reset.
class Call {
 public:
  explicit Call(std::shared_ptr<Unit> unit);
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Gathers the unit, and replaces inputs by ones whose gradients tell when its backward is done.
  void enter(const std::vector<at::Tensor*>& inputs);
  // Frees the unit, and lets the results' gradients gather it again.
  void leave(const std::vector<at::Tensor*>& results);
  // Turns an exception of forward into the Error that explains it, or throws it on as it is.
  [[noreturn]] void explain(std::exception_ptr failure) const;
  [[nodiscard]] const Unit& unit() const { return *unit_; }

 private:
  std::shared_ptr<Unit> unit_;
  std::size_t depth_ = 0;  // calls around it
  bool left_ = false;
};

// The base of tessera::ModuleHolder. In a namespace of its own: calls of functions with a holder
// look for them where its bases are.
namespace holders {
template <typename Impl>
class OwningHolder : public torch::nn::ModuleHolder<Impl> {
 public:
  using torch::nn::ModuleHolder<Impl>::ModuleHolder;
  OwningHolder() = default;
  OwningHolder(const OwningHolder&) = default;
  OwningHolder(OwningHolder&&) noexcept = default;
  OwningHolder& operator=(const OwningHolder& other) { return *this = OwningHolder(other); }
  OwningHolder& operator=(OwningHolder&& other) noexcept {
    OwningHolder old(std::move(other));
    std::swap(this->impl_, old.impl_);
    return *this;
  }
  ~OwningHolder() {
    if (this->impl_.use_count() != 1) return;
    const UnitsOf units(*this->impl_);
    this->impl_.reset();
  }
};
}  // namespace holders

// The module behind a holder, a shared_ptr or a reference.
template <typename Module>
auto& impl_of(Module& module) {
  using Plain = std::remove_const_t<Module>;
  if constexpr (std::is_base_of_v<torch::detail::ModuleHolderIndicator, Plain>) {
    return *module.ptr();
  } else if constexpr (requires { typename Plain::element_type; }) {
    return *module;
  } else {
    return module;
  }
}

// Whether a copy goes to an overloaded or generic function, of which no parameters are known.
template <typename Parameters, typename Argument>
inline constexpr bool kIsWatchedCopy = std::is_lvalue_reference_v<Argument> &&
                                       (std::tuple_size_v<Parameters> == 0);

// `forward` is what is called between the unit's steps; it has these parameters, as far as known.
template <typename Parameters, typename Forward, typename... Arguments, std::size_t... I>
auto call_unit(std::shared_ptr<Unit> unit, Forward&& forward, std::index_sequence<I...>,
               Arguments&&... arguments)
    -> decltype(forward(std::forward<Arguments>(arguments)...)) {
  using Result = decltype(forward(std::forward<Arguments>(arguments)...));
  if constexpr (!TensorsOf<std::decay_t<Result>>::known)
    throw_unknown_result(*unit, typeid(Result));
  Call scope(std::move(unit));
  try {
    std::tuple<Carried<Arguments, may_change<Parameters, I>()>...> carried(
        std::forward<Arguments>(arguments)...);
    HandedIn handed([&carried] {
      std::vector<at::Tensor*> changed;
      (collect_tensors_if<may_change<Parameters, I>()>(std::get<I>(carried), changed), ...);
      return changed;
    });
    std::vector<at::Tensor*> tensors;
    (collect_tensors(std::get<I>(carried), tensors), ...);
    scope.enter(tensors);
    handed.note();
    const Unchanged copies([&carried] {
      std::vector<at::Tensor*> found;
      (collect_tensors_if<kIsWatchedCopy<Parameters, Arguments>>(std::get<I>(carried), found), ...);
      return found;
    });
    if constexpr (std::is_void_v<Result>) {
      forward(hand_over<Arguments, may_change<Parameters, I>()>(std::get<I>(carried))...);
      copies.require(scope.unit());
      scope.leave(handed.give_back());
    } else {
      Result result =
          forward(hand_over<Arguments, may_change<Parameters, I>()>(std::get<I>(carried))...);
      copies.require(scope.unit());
      tensors = handed.give_back();
      collect_tensors(result, tensors);
      scope.leave(tensors);
      return result;
    }
  } catch (...) {
    scope.explain(std::current_exception());
  }
}

template <typename Impl, typename... Arguments>
auto call_module(Impl& impl, Arguments&&... arguments)
    -> decltype(impl.forward(std::forward<Arguments>(arguments)...)) {
  auto unit = find_unit(&impl);
  if (!unit) return impl.forward(std::forward<Arguments>(arguments)...);
  const auto forward = [&](auto&&... passed) -> decltype(auto) {
    return impl.forward(std::forward<decltype(passed)>(passed)...);
  };
  return call_unit<typename ParametersOfForward<std::remove_const_t<Impl>>::type>(
      std::move(unit), forward, std::index_sequence_for<Arguments...>(),
      std::forward<Arguments>(arguments)...);
}

// `call` is a function of the module and the arguments, or a member function.
template <typename Call, typename Impl, typename... Arguments>
decltype(auto) call_with(Call& call, Impl& impl, Arguments&&... arguments) {
  const auto forward = [&](auto&&... passed) -> decltype(auto) {
    return std::invoke(call, impl, std::forward<decltype(passed)>(passed)...);
  };
  auto unit = find_unit(&impl);
  if (!unit) return forward(std::forward<Arguments>(arguments)...);
  return call_unit<typename ParametersOfCall<std::remove_const_t<Call>>::type>(
      std::move(unit), forward, std::index_sequence_for<Arguments...>(),
      std::forward<Arguments>(arguments)...);
}

}  // namespace detail
}  // namespace tessera
