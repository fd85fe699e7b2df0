// How much memory each thread of a job may take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "checkpoint/read/coalesce.h"
#include "tessera/leaf.h"

namespace tessera {

// What each of the working threads may take of all memory: a window and a tile of its own, and one
// request's bytes (kSpanBytes) besides.
struct Buffers {
  std::size_t window;
  std::size_t tile;
};

// What a request for a tensor's bytes costs as much as, in bytes. Opens the file of its first
// piece that is in one.
[[nodiscard]] inline std::uint64_t request_cost_of(const Tensor& tensor) {
  for (const Piece& piece : tensor.pieces)
    if (piece.storage && piece.storage->source) return piece.storage->source->request_cost();
  return kNearRequest;
}
[[nodiscard]] inline std::uint64_t request_cost_of(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves)
    if (leaf.value.is(Value::Kind::tensor)) return request_cost_of(leaf.value.as_tensor());
  return kNearRequest;
}

// A window is larger where requests cost more.
[[nodiscard]] inline Buffers buffers_for(std::uint64_t memory, std::uint64_t workers,
                                         std::uint64_t request_cost = kNearRequest) {
  constexpr std::uint64_t kLeast = 64 << 10;
  const std::uint64_t largest_window = std::max<std::uint64_t>(1 << 20, 16 * request_cost);
  constexpr std::uint64_t kLargestTile = 1 << 30;
  const std::uint64_t share = memory / std::max<std::uint64_t>(workers, 1);
  const std::uint64_t window = std::clamp(share / 2, kLeast, largest_window);
  const std::uint64_t besides = window + static_cast<std::uint64_t>(kSpanBytes);
  const std::uint64_t tile = std::max(share / 2, share - std::min(share, besides));
  return {static_cast<std::size_t>(window),
          static_cast<std::size_t>(std::clamp(tile, kLeast, kLargestTile))};
}

}  // namespace tessera
