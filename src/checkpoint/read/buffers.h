// How much memory each thread of a job may take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "checkpoint/read/coalesce.h"

namespace tessera {

// What each of the working threads may take of all memory: a window and a tile of its own, and one
// request's bytes (kSpanBytes) besides.
struct Buffers {
  std::size_t window;
  std::size_t tile;
};

[[nodiscard]] inline Buffers buffers_for(std::uint64_t memory, std::uint64_t workers) {
  constexpr std::uint64_t kLeast = 64 << 10;
  constexpr std::uint64_t kLargestWindow = 1 << 20;
  constexpr std::uint64_t kLargestTile = 1 << 30;
  const std::uint64_t share = memory / std::max<std::uint64_t>(workers, 1);
  const std::uint64_t window = std::clamp(share / 2, kLeast, kLargestWindow);
  const std::uint64_t besides = window + static_cast<std::uint64_t>(kSpanBytes);
  const std::uint64_t tile = std::max(share / 2, share - std::min(share, besides));
  return {static_cast<std::size_t>(window),
          static_cast<std::size_t>(std::clamp(tile, kLeast, kLargestTile))};
}

}  // namespace tessera
