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

// `bytes`: of an element.
std::unordered_map<std::size_t, Runs> runs_by_piece(std::span<const Copy> plan,
                                                    std::int64_t bytes) {
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
  return by_piece;
}

// The longest gap, in bytes, such that all up to it together are worth reading over.
std::int64_t longest_worth_reading(const Runs& runs) {
  std::int64_t over = 0;
  std::size_t bits = 0;
  while (bits + 1 < kBuckets) {
    over += runs.gaps[bits + 1];
    if (over * kNeededPerGapByte > runs.needed) break;
    ++bits;
  }
  return (std::int64_t{1} << bits) - 1;
}

}  // namespace

std::vector<std::int64_t> gaps_to_close(std::span<const Copy> plan,
                                        std::span<const std::int64_t> free, std::size_t element) {
  const auto bytes = static_cast<std::int64_t>(element);
  std::vector<std::int64_t> closed(free.begin(), free.end());
  for (std::int64_t& gap : closed) gap /= bytes;
  for (const auto& [piece, runs] : runs_by_piece(plan, bytes))
    closed[piece] = std::max(closed[piece], longest_worth_reading(runs) / bytes);
  return closed;
}

}  // namespace tessera
