#include "checkpoint/save/placed_walk.h"

#include <algorithm>

#include "layout/placement.h"
#include "tessera/error.h"

namespace tessera {
namespace {

int holders_of(const Placement& placement, int part, int ranks) {
  const int cycle = placement.parts * placement.stride;
  const int first = part * placement.stride;
  return ranks / cycle * placement.stride + std::clamp(ranks % cycle - first, 0, placement.stride);
}

// Visits the ranks that hold the part, ascending.
template <typename Visit>
void for_each_holder(const Placement& placement, int part, int ranks, const Visit& visit) {
  const int cycle = placement.parts * placement.stride;
  for (int base = part * placement.stride; base < ranks; base += cycle) {
    for (int rank = base; rank < std::min(base + placement.stride, ranks); ++rank) visit(rank);
  }
}

std::vector<int> holders_of_part(const Placement& placement, int part, int ranks) {
  std::vector<int> holders;
  for_each_holder(placement, part, ranks, [&](int rank) { holders.push_back(rank); });
  return holders;
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
    made.writer = made.holders == 1 ? part * placement.stride : writer_of_part(leaf, part);
    add_load(made.writer, bytes_of(leaf.dtype, made.boxes));
    visit(part, made);
  }
}

int PlacedWalk::writer_of_part(const PlannedLeaf& leaf, int part) const {
  const Placement& placement = *leaf.placement;
  if (rules_.function) return chosen(leaf.name, holders_of_part(placement, part, ranks()));
  int writer = part * placement.stride;
  if (rules_.replicas == ReplicaWriter::lowest_rank) return writer;
  for_each_holder(placement, part, ranks(), [&](int rank) {
    if (loads_[static_cast<std::size_t>(rank)] < loads_[static_cast<std::size_t>(writer)])
      writer = rank;
  });
  return writer;
}

int PlacedWalk::chosen(const std::string& key, std::span<const int> holders) const {
  const int writer = rules_.function(key, holders);
  if (std::ranges::binary_search(holders, writer)) return writer;
  throw Error(ErrorCode::invalid_argument,
              "rank " + std::to_string(writer) +
                  " is to write a part that it does not hold: " + std::to_string(holders.size()) +
                  " ranks do, the first is rank " + std::to_string(holders.front()))
      .at_key(key);
}

int PlacedWalk::writer_of(const std::string& key, std::span<const int> holders) const {
  if (rules_.function && holders.size() > 1) return chosen(key, holders);
  if (rules_.replicas == ReplicaWriter::lowest_rank) return holders.front();
  return *std::ranges::min_element(
      holders, {}, [this](int rank) { return loads_[static_cast<std::size_t>(rank)]; });
}

}  // namespace tessera
