#include "checkpoint/save/placed_walk.h"

#include <algorithm>

#include "layout/placement.h"

namespace tessera {
namespace {

int holders_of(const Placement& placement, int part, int ranks) {
  const int cycle = placement.parts * placement.stride;
  const int first = part * placement.stride;
  return ranks / cycle * placement.stride + std::clamp(ranks % cycle - first, 0, placement.stride);
}

std::uint64_t bytes_of(DType dtype, const std::vector<Box>& boxes) {
  std::uint64_t bytes = 0;
  for (const Box& box : boxes) bytes += byte_size(dtype, box.sizes);
  return bytes;
}

}  // namespace

void PlacedWalk::leaf(const PlannedLeaf& leaf, const Visit& visit) {
  const Placement& placement = *leaf.placement;
  PlacedPart made;
  for (int part = 0; part < placement.parts; ++part) {
    made.boxes = boxes_of_part(placement, leaf.shape, part);
    if (made.boxes.empty()) continue;
    made.holders = holders_of(placement, part, ranks());
    made.writer = made.holders == 1 ? part * placement.stride : writer_of_part(placement, part);
    add_load(made.writer, bytes_of(leaf.dtype, made.boxes));
    visit(part, made);
  }
}

int PlacedWalk::writer_of_part(const Placement& placement, int part) const {
  int writer = part * placement.stride;
  if (rule_ == ReplicaWriter::lowest_rank) return writer;
  const int cycle = placement.parts * placement.stride;
  for (int base = writer; base < ranks(); base += cycle) {
    for (int rank = base; rank < std::min(base + placement.stride, ranks()); ++rank) {
      if (loads_[static_cast<std::size_t>(rank)] < loads_[static_cast<std::size_t>(writer)])
        writer = rank;
    }
  }
  return writer;
}

int PlacedWalk::writer_of(std::span<const int> holders) const {
  if (rule_ == ReplicaWriter::lowest_rank) return holders.front();
  return *std::ranges::min_element(
      holders, {}, [this](int rank) { return loads_[static_cast<std::size_t>(rank)]; });
}

}  // namespace tessera
