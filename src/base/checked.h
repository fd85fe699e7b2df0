// Arithmetic on numbers that came from a file: throws `limit` where C++ would wrap.
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "tessera/error.h"

namespace tessera {

template <std::integral T>
[[nodiscard]] T checked_add(T a, T b) {
  T result{};
  if (__builtin_add_overflow(a, b, &result)) {
    throw Error(ErrorCode::limit,
                std::to_string(a) + " + " + std::to_string(b) + " does not fit its type");
  }
  return result;
}

template <std::integral T>
[[nodiscard]] T checked_sub(T a, T b) {
  T result{};
  if (__builtin_sub_overflow(a, b, &result)) {
    throw Error(ErrorCode::limit,
                std::to_string(a) + " - " + std::to_string(b) + " does not fit its type");
  }
  return result;
}

template <std::integral T>
[[nodiscard]] T checked_mul(T a, T b) {
  T result{};
  if (__builtin_mul_overflow(a, b, &result)) {
    throw Error(ErrorCode::limit,
                std::to_string(a) + " * " + std::to_string(b) + " does not fit its type");
  }
  return result;
}

// The same number in another integer type; throws `limit` when it has no place there.
template <std::integral To, std::integral From>
[[nodiscard]] To narrow(From value) {
  if (!std::in_range<To>(value)) {
    throw Error(ErrorCode::limit, "the number " + std::to_string(value) + " is out of range");
  }
  return static_cast<To>(value);
}

}  // namespace tessera
