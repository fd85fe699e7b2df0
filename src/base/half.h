// The two 16-bit floating types as values: converted to float32 to compute, rounded to nearest,
// ties to even, on the way back.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

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
