#include "checkpoint/together/share.h"

#include <algorithm>

#include "layout/boxes.h"
#include "layout/placement.h"

namespace tessera {
namespace {

// One of `count` shares of a box: rows, by torch.chunk's rule. A scalar is in the first one.
std::vector<Box> share_of(const Box& box, const Holders& holders) {
  if (holders.count == 1) return {box};
  if (box.sizes.empty()) return holders.index == 0 ? std::vector{box} : std::vector<Box>();
  Box rows = chunk_of(box, 0, holders.count, holders.index);
  return numel(rows) == 0 ? std::vector<Box>() : std::vector{std::move(rows)};
}

}  // namespace

Holders holders_of(const Placement& placement, int rank, int ranks) {
  const int cycle = placement.parts * placement.stride;
  const int first = part_of_rank(placement, rank) * placement.stride;  // in each cycle
  const int rest = std::clamp(ranks % cycle - first, 0, placement.stride);
  return {ranks / cycle * placement.stride + rest,
          rank / cycle * placement.stride + rank % cycle - first};
}

std::vector<Box> boxes_to_write(const Placement& placement, const Shape& shape,
                                const Sharer& sharer) {
  if (numel(shape) == 0) return {};
  const int part = part_of_rank(placement, sharer.rank);
  const bool is_owners = sharer.owner >= 0 && part_of_rank(placement, sharer.owner) == part;
  if (is_owners && sharer.owner != sharer.rank) return {};
  const std::vector<Box> held = boxes_of_part(placement, shape, part);
  if (is_owners) return held;
  const Holders holders = holders_of(placement, sharer.rank, sharer.ranks);
  std::vector<Box> boxes;
  for (const Box& box : held) {
    for (Box& share : share_of(box, holders)) boxes.push_back(std::move(share));
  }
  return boxes;
}

}  // namespace tessera
