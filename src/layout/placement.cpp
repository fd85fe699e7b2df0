#include "layout/placement.h"

#include <algorithm>

#include "layout/boxes.h"

namespace tessera {
namespace {

// Does not overflow where the product of both would.
std::int64_t part_begin(const Placement& placement, std::int64_t count, int part) {
  const std::int64_t reach = placement.begin + count;
  const std::int64_t before =
      part > reach / placement.shard ? reach : placement.shard * std::int64_t{part};
  return std::clamp<std::int64_t>(before - placement.begin, 0, count);
}

}  // namespace

bool fits(const Placement& placement, const Shape& shape, int ranks) {
  if (placement.parts < 1 || placement.stride < 1) return false;
  if (placement.parts > ranks / placement.stride) return false;
  if (placement.parts == 1) return true;
  if (placement.shard == 0)
    return placement.dim >= 0 && static_cast<std::size_t>(placement.dim) < shape.size();
  if (placement.shard < 0 || placement.begin < 0) return false;
  // The last part reaches the tensor's end.
  const std::int64_t count = numel(shape);
  return part_begin(placement, count, placement.parts) == count;
}

std::vector<Box> boxes_of_part(const Placement& placement, const Shape& shape, int part) {
  const std::int64_t count = numel(shape);
  if (placement.parts == 1 || count == 0)
    return part == 0 ? std::vector<Box>{whole(shape)} : std::vector<Box>();
  if (placement.shard > 0) {
    return boxes_of({part_begin(placement, count, part), part_begin(placement, count, part + 1)},
                    shape);
  }
  Box box = chunk_of(whole(shape), static_cast<std::size_t>(placement.dim), placement.parts, part);
  if (numel(box) == 0) return {};
  return {std::move(box)};
}

}  // namespace tessera
