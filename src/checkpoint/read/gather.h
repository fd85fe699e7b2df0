// Elements that lie at strides in a file, brought together in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "layout/strided_copy.h"
#include "tessera/io.h"

namespace tessera {

// Reads ranges of a storage, whose offsets ascend unless the array's elements overlap; may change
// the list.
using RangeReader = std::function<void(std::span<ReadRange> ranges)>;

// What gathers share, so that each does not ask for memory anew.
struct GatherScratch {
  std::vector<std::byte> bytes;
  std::vector<ReadRange> ranges;
};

// Carries out `move` from a storage to `out`: `move.from` counts elements of `element` bytes from
// byte `origin` of the storage. The storage is read from front to back in ranges that close gaps
// of at most kFreeGapBytes, as many at a time as fit into about kSpanBytes; each time one call of
// `read` brings them, and what they hold is copied to its places in blocks that suit the cache.
void gather(const StridedMove& move, std::size_t element, std::uint64_t origin,
            const RangeReader& read, std::byte* out, GatherScratch& scratch);

}  // namespace tessera
