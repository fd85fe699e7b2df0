#include "checkpoint/read/coalesce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <unordered_map>

namespace tessera {
namespace {

constexpr std::size_t kBuckets =
    static_cast<std::size_t>(std::bit_width(std::uint64_t{kSpanBytes}));

// What a plan reads of one piece.
struct Runs {
  std::int64_t end = -1;    // of the run before, in elements
  std::int64_t needed = 0;  // elements
  // Elements in gaps whose length in bytes has so many bits.
  std::array<std::int64_t, kBuckets> gaps{};
};

}  // namespace

std::vector<std::int64_t> gaps_to_close(std::span<const Copy> plan, std::size_t pieces,
                                        std::size_t element) {
  const auto bytes = static_cast<std::int64_t>(element);
  std::unordered_map<std::size_t, Runs> by_piece;
  for (const Copy& copy : plan) {
    Runs& runs = by_piece[copy.from];
    const std::int64_t gap = runs.end < 0 ? 0 : copy.from_local - runs.end;
    if (gap > 0 && gap * bytes < kSpanBytes)
      runs.gaps[static_cast<std::size_t>(
          std::bit_width(static_cast<std::uint64_t>(gap * bytes)))] += gap;
    runs.end = copy.from_local + copy.count;
    runs.needed += copy.count;
  }
  std::vector<std::int64_t> closed(pieces, kFreeGapBytes / bytes);
  for (const auto& [piece, runs] : by_piece) {
    std::int64_t over = 0;
    for (std::size_t bits = 1; bits < kBuckets; ++bits) {
      over += runs.gaps[bits];
      if (over * kNeededPerGapByte > runs.needed) break;
      const std::int64_t longest = (std::int64_t{1} << bits) - 1;  // bytes
      closed[piece] = std::max(closed[piece], longest / bytes);
    }
  }
  return closed;
}

}  // namespace tessera
