// Which runs of a piece are worth reading together.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "layout/plan.h"
#include "tessera/layout.h"

namespace tessera {

// Gaps that are shorter are always read over: a request of its own costs more than these bytes.
inline constexpr std::int64_t kFreeGapBytes = 4 << 10;  // near
// Longer gaps are read over only while they add less than one byte to so many that are needed.
inline constexpr std::int64_t kNeededPerGapByte = 20;
// Bytes that one request for several runs may span: it bounds the scratch memory.
inline constexpr std::int64_t kSpanBytes = 1 << 20;

// For each source piece the longest gap between two of its runs, in elements of `element` bytes,
// that is read over when `plan` is carried out; `free` has the bytes that are always read over, for
// each. Computed from the whole plan: a few small holes in large runs are closed, and regular ones
// that are larger than `free` (columns of a wide tensor) stay unread.
[[nodiscard]] std::vector<std::int64_t> gaps_to_close(std::span<const Copy> plan,
                                                      std::span<const std::int64_t> free,
                                                      std::size_t element);
// The free gap of a source where a request costs as much as so many bytes.
[[nodiscard]] inline std::int64_t free_gap_of(std::uint64_t request_cost) {
  return static_cast<std::int64_t>(
      std::clamp<std::uint64_t>(request_cost, kFreeGapBytes, kSpanBytes - 1));
}

}  // namespace tessera
