// Floating point of 8 bits and less.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/dtype.h"

namespace tessera {

[[nodiscard]] bool is_small_float(DType dtype) noexcept;

// The values of all 256 bytes of a float8 type. Throws `unsupported` for other types.
[[nodiscard]] std::array<float, 256> float8_values(DType dtype);

// The values of the 16 nibbles of float4_e2m1fn.
inline constexpr std::array<float, 16> kFloat4Values = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                        4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                        -2.0F, -3.0F, -4.0F, -6.0F};

}  // namespace tessera
