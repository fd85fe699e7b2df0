// Numbers: arithmetic that does not wrap, byte order, floats of 16 bits.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tessera/error.h"

namespace tessera {

// Arithmetic on numbers that came from a file: throws `limit` where C++ would wrap.

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

// Little-endian numbers in byte buffers. The caller guarantees the room.

static_assert(std::endian::native == std::endian::little, "Tessera runs on little-endian machines");

template <typename T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] T load_le(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
requires std::is_trivially_copyable_v<T>
void store_le(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <typename T>
requires std::is_trivially_copyable_v<T>
void append_le(std::vector<std::byte>& to, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

// The two 16-bit floating types as values: converted to float32 to compute, rounded to nearest,
// ties to even, on the way back.

struct BFloat16 {
  std::uint16_t bits;
  operator float() const { return std::bit_cast<float>(std::uint32_t{bits} << 16); }  // NOLINT
  static BFloat16 from(float value) {
    std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
    if (std::isnan(value)) return {static_cast<std::uint16_t>(0x7FC0)};
    bits += 0x7FFF + ((bits >> 16) & 1);  // nearest, ties to even
    return {static_cast<std::uint16_t>(bits >> 16)};
  }
};

struct Half {
  _Float16 value;
  operator float() const { return static_cast<float>(value); }  // NOLINT
  static Half from(float value) { return {static_cast<_Float16>(value)}; }
};

}  // namespace tessera
