// Element-wise reduction of what several ranks hold, the same bits on every rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "tessera/dtype.h"

namespace tessera::same_host {

enum class Reduction : std::uint8_t { sum, average, minimum, maximum };

// float32, float64, float16, bfloat16: all four. int8 to int64, uint8: all but average; sums wrap
// around. bool: as sum and maximum "any", as minimum "all". Nothing else.
[[nodiscard]] bool can_reduce(DType dtype, Reduction reduction) noexcept;

// out[i] = sources[0][i] + sources[1][i] + ..., in that order, for i < elements. float16 and
// bfloat16 are added in float32 and rounded once, at the end; an average divides before that.
// Minimum and maximum of NaN and anything are NaN. `out` may be one of the sources. Requires
// can_reduce.
void reduce(DType dtype, Reduction reduction, std::span<const std::byte* const> sources,
            std::byte* out, std::size_t elements);

}  // namespace tessera::same_host
