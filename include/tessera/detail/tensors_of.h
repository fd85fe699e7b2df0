// TensorsOf<T>: finds the tensors in a value that goes into or comes out of a forward.
//
// Specialize it for a struct of your own to let a sharded module take or return it:
//   template <> struct tessera::TensorsOf<Output> {
//     static constexpr bool known = true, any = true;
//     template <typename F> static void visit(Output& o, F&& f) { f(o.logits); f(o.hidden); }
//   };
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/ordered_dict.h>

namespace [[gnu::visibility("default")]] tessera {

// `known`: whether all tensors inside a T are found. `any`: whether there may be some.
template <typename T, typename = void>
struct TensorsOf {
  static constexpr bool known = std::is_void_v<T> || std::is_arithmetic_v<T> || std::is_enum_v<T> ||
                                std::is_same_v<T, std::string>;
  static constexpr bool any = false;
  template <typename F>
  static void visit(T&, F&&) {}
};

template <>
struct TensorsOf<void> {
  static constexpr bool known = true;
  static constexpr bool any = false;
};

template <typename T>
struct TensorsOf<T, std::enable_if_t<std::is_base_of_v<at::Tensor, T>>> {
  static constexpr bool known = true;
  static constexpr bool any = true;
  template <typename F>
  static void visit(at::Tensor& tensor, F&& f) {
    f(tensor);
  }
};

template <typename T>
struct TensorsOf<std::optional<T>> {
  static constexpr bool known = TensorsOf<T>::known;
  static constexpr bool any = TensorsOf<T>::any;
  template <typename F>
  static void visit(std::optional<T>& value, F&& f) {
    if (value) TensorsOf<T>::visit(*value, f);
  }
};

namespace detail {

// Sequences and maps: everything that a range-for walks over.
template <typename T>
struct TensorsOfItems {
  static constexpr bool known = TensorsOf<T>::known;
  static constexpr bool any = TensorsOf<T>::any;
  template <typename C, typename F>
  static void visit(C& items, F&& f) {
    if constexpr (any) {
      for (auto& item : items) TensorsOf<T>::visit(item, f);
    }
  }
};

template <typename T>
struct TensorsOfValues {
  static constexpr bool known = TensorsOf<T>::known;
  static constexpr bool any = TensorsOf<T>::any;
  template <typename C, typename F>
  static void visit(C& pairs, F&& f) {
    if constexpr (any) {
      for (auto& pair : pairs) TensorsOf<T>::visit(pair.second, f);
    }
  }
};

}  // namespace detail

template <typename T, typename A>
struct TensorsOf<std::vector<T, A>> : detail::TensorsOfItems<T> {};
template <typename T, std::size_t N>
struct TensorsOf<std::array<T, N>> : detail::TensorsOfItems<T> {};
template <typename K, typename T, typename C, typename A>
struct TensorsOf<std::map<K, T, C, A>> : detail::TensorsOfValues<T> {};
template <typename K, typename T, typename H, typename E, typename A>
struct TensorsOf<std::unordered_map<K, T, H, E, A>> : detail::TensorsOfValues<T> {};

template <typename K, typename T>
struct TensorsOf<torch::OrderedDict<K, T>> {
  static constexpr bool known = TensorsOf<T>::known;
  static constexpr bool any = TensorsOf<T>::any;
  template <typename F>
  static void visit(torch::OrderedDict<K, T>& dict, F&& f) {
    for (auto& item : dict) TensorsOf<T>::visit(item.value(), f);
  }
};

template <typename... T>
struct TensorsOf<std::tuple<T...>> {
  static constexpr bool known = (TensorsOf<T>::known && ...);
  static constexpr bool any = (TensorsOf<T>::any || ...);
  template <typename F>
  static void visit(std::tuple<T...>& values, F&& f) {
    std::apply([&](auto&... value) { (TensorsOf<T>::visit(value, f), ...); }, values);
  }
};

template <typename A, typename B>
struct TensorsOf<std::pair<A, B>> {
  static constexpr bool known = TensorsOf<A>::known && TensorsOf<B>::known;
  static constexpr bool any = TensorsOf<A>::any || TensorsOf<B>::any;
  template <typename F>
  static void visit(std::pair<A, B>& values, F&& f) {
    TensorsOf<A>::visit(values.first, f);
    TensorsOf<B>::visit(values.second, f);
  }
};

// What is known of the parameters of a forward. Internal; see tessera/fsdp.h.
namespace detail {

// The parameters of a member function; none are known of one that is overloaded or a template.
template <typename Function>
struct ParametersOf {
  using type = std::tuple<>;
};
template <typename Class, typename Result, bool kNoexcept, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...) noexcept(kNoexcept)> {
  using type = std::tuple<Parameters...>;
};
template <typename Class, typename Result, bool kNoexcept, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...) const noexcept(kNoexcept)> {
  using type = std::tuple<Parameters...>;
};
template <typename Class, typename Result, bool kNoexcept, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...)& noexcept(kNoexcept)> {
  using type = std::tuple<Parameters...>;
};
template <typename Class, typename Result, bool kNoexcept, typename... Parameters>
struct ParametersOf<Result (Class::*)(Parameters...) const& noexcept(kNoexcept)> {
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

// What a function gets behind the module that is its first parameter, or that it is a member of.
template <typename Parameters>
struct BehindFirst {
  using type = std::tuple<>;
};
template <typename First, typename... Others>
struct BehindFirst<std::tuple<First, Others...>> {
  using type = std::tuple<Others...>;
};
template <typename Call>
struct ParametersOfCall : ParametersOf<Call> {};
template <typename Result, bool kNoexcept, typename First, typename... Others>
struct ParametersOfCall<Result (*)(First, Others...) noexcept(kNoexcept)> {
  using type = std::tuple<Others...>;
};
template <typename Call>
requires requires {
  &Call::operator();
}
struct ParametersOfCall<Call>
    : BehindFirst<typename ParametersOf<decltype(&Call::operator())>::type> {};

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
