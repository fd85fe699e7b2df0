// Conversion of elements between dtypes, as torch's copy_ does it.
#pragma once

#include <cstdint>

#include "tessera/dtype.h"

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Whether cast() knows the pair: floating point of 16 bits and more, integers up to 64 bits, bool.
[[nodiscard]] bool can_cast(DType from, DType to) noexcept;

// Whether the conversion makes other numbers of integers: `to` is an integer type that does not
// hold every value of `from`, or bool. The table is in docs/design/casts.md.
[[nodiscard]] bool can_wrap(DType from, DType to) noexcept;

// `count` elements; `in` and `out` do not overlap. Floating point is rounded to nearest, ties to
// even. Throws `unsupported` for a pair that can_cast refuses.
void cast(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t count);

}  // namespace tessera
#pragma GCC visibility pop
