// Elements that lie at strides in a file or on a device, brought together in memory, and the way
// back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "layout/strided.h"
#include "tessera/io.h"
#include "tessera/layout.h"

namespace tessera {

// Reads ranges of a storage, whose offsets ascend unless the array's elements overlap; may change
// the list.
using RangeReader = std::function<void(std::span<ReadRange> ranges)>;

// Memory that gathers share, so that each does not ask for memory anew.
struct GatherScratch {
  std::vector<std::byte> bytes;
  std::vector<ReadRange> ranges;
};

// `box` of an array with strides `from` goes to an array with strides `to`, its index 0 to element
// `first` there.
[[nodiscard]] StridedMove move_of(const Box& box, const Shape& from, const Shape& to,
                                  std::int64_t first);

// Carries out `move` from a storage to `out`: `move.from` counts elements of `element` bytes from
// byte `origin` of the storage. The storage is read from front to back in ranges that close gaps
// of at most kFreeGapBytes, as many at a time as fit into about kSpanBytes; each time one call of
// `read` brings them, and what they hold is copied to its places in blocks that suit the cache.
void gather(const StridedMove& move, std::size_t element, std::uint64_t origin,
            const RangeReader& read, std::byte* out, GatherScratch& scratch);

// Writes ranges of a storage, each from its `out`; may change the list.
using RangeWriter = std::function<void(std::span<ReadRange> ranges)>;

// The reverse of gather, with the same `move`: elements of `in` go to their places in the storage.
// Calls of `write` name the bytes of these elements and no others. No two elements of the move may
// have one place there.
void scatter(const StridedMove& move, std::size_t element, std::uint64_t origin,
             const std::byte* in, const RangeWriter& write, GatherScratch& scratch);

}  // namespace tessera
