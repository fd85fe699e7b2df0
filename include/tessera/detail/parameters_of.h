// What is known of the parameters of a forward. Internal; see tessera/fsdp.h.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>

#include "tessera/detail/tensors_of.h"

namespace [[gnu::visibility("default")]] tessera {
namespace detail {

// The parameters of a member function; none are known of one that is overloaded or a template.
template <typename Function>
struct ParametersOf {
  using type = std::tuple<>;
};
template <typename Class, typename Result, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...)> {
  using type = std::tuple<Parameters...>;
};
template <typename Class, typename Result, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...) const> {
  using type = std::tuple<Parameters...>;
};
template <typename Impl>
struct ParametersOfForward {
  using type = std::tuple<>;
};
template <typename Impl>
requires requires {
  &Impl::forward;
}
struct ParametersOfForward<Impl> : ParametersOf<decltype(&Impl::forward)> {};

// Whether parameter I is a reference through which forward may change what has tensors inside.
template <typename Parameters, std::size_t I>
constexpr bool may_change() {
  if constexpr (I < std::tuple_size_v<Parameters>) {
    using Parameter = std::tuple_element_t<I, Parameters>;
    return std::is_lvalue_reference_v<Parameter> &&
           !std::is_const_v<std::remove_reference_t<Parameter>> &&
           TensorsOf<std::decay_t<Parameter>>::any;
  } else {
    return false;
  }
}

}  // namespace detail
}  // namespace tessera
