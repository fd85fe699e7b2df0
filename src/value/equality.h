// Equality of values that also looks into the tensors, and what is equal for equal values: hash,
// digest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string_view>

#include "tessera/value.h"

namespace tessera {

// A hash that is equal for equal values.

[[nodiscard]] inline std::size_t hash_of(std::string_view text) noexcept {
  return std::hash<std::string_view>{}(text);
}

// Looks at a bounded number of nodes, so that it is cheap for large and for deeply shared values.
[[nodiscard]] std::size_t hash_of(const Value& value);

// Whether a value is this one thing.

// The class or function `name` of `module`, referred to by name.
[[nodiscard]] inline bool is_global(const Value& value, std::string_view module,
                                    std::string_view name) {
  return value.is(Value::Kind::global) && value.global_name() == name &&
         value.global_module() == module;
}

[[nodiscard]] inline bool is_text(const Value& value, std::string_view text) {
  return value.is(Value::Kind::string) && value.as_string() == text;
}

// Equality of values that also looks into the tensors.

// Whether two tensors of one dtype, shape and strides hold the same elements.
using SameElements = std::function<bool(const Tensor&, const Tensor&)>;

// As operator==, and all tensors that correspond to each other are `same`.
[[nodiscard]] bool equal_with_elements(const Value& a, const Value& b, const SameElements& same);

// A digest that is equal for equal values, on every machine.

// `of_elements`: a digest of a tensor's elements; the rest of the tensor is digested here. As for
// ==, the order of dicts and sets and the sharing of nodes do not count. Throws as
// require_walkable (children.h) does.
[[nodiscard]] std::uint64_t digest_of(
    const Value& value, const std::function<std::uint64_t(const Tensor&)>& of_elements);

}  // namespace tessera
