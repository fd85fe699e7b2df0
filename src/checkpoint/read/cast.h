// Whether a read may change the type of elements.
#pragma once

#include <array>
#include <cstdint>

#include "tessera/layout.h"

namespace tessera {

// Throws `mismatch` when elements of `have` may not become `want` without the permission that is
// missing, and `unsupported` when there is no conversion. Permissions are those of LoadOptions.
void require_castable(DType have, DType want, bool allow_cast, bool allow_wrap);

// Floating point of 8 bits and less.

[[nodiscard]] bool is_small_float(DType dtype) noexcept;

// The values of all 256 bytes of a float8 type. Throws `unsupported` for other types.
[[nodiscard]] std::array<float, 256> float8_values(DType dtype);

// The values of the 16 nibbles of float4_e2m1fn.
inline constexpr std::array<float, 16> kFloat4Values = {0.0F,  0.5F,  1.0F,  1.5F,  2.0F,  3.0F,
                                                        4.0F,  6.0F,  -0.0F, -0.5F, -1.0F, -1.5F,
                                                        -2.0F, -3.0F, -4.0F, -6.0F};

}  // namespace tessera

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Conversion of elements between dtypes, as torch's copy_ does it.

// Whether cast() knows the pair: floating point of 16 bits and more, integers up to 64 bits, bool.
[[nodiscard]] bool can_cast(DType from, DType to) noexcept;

// Whether the conversion makes other numbers of integers: `to` is an integer type that does not
// hold every value of `from`, or bool. The table is in docs/design/casts.md.
[[nodiscard]] bool can_wrap(DType from, DType to) noexcept;

// `count` elements; `in` and `out` do not overlap. Floating point is rounded to nearest, ties to
// even. Throws `unsupported` for a pair that can_cast refuses.
void cast(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t count);

// What a cast between floating types did to numbers besides rounding them.
struct CastLoss {
  bool infinities = false;  // finite numbers became infinite
  bool integers = false;    // whole numbers became others: counts of steps, ids
};
// Adds what cast() did to these elements. Costs little while they are small, as weights are.
void add_loss(DType from, const std::byte* in, DType to, const std::byte* out, std::int64_t count,
              CastLoss& loss);

}  // namespace tessera
#pragma GCC visibility pop
