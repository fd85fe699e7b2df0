// The parts of a tensor that a Placement speaks of.
#pragma once

#include <vector>

#include "tessera/layout.h"

namespace tessera {

[[nodiscard]] constexpr int part_of_rank(const Placement& placement, int rank) noexcept {
  return rank / placement.stride % placement.parts;
}

// Whether `ranks` ranks hold all parts, and the rule fits the shape.
[[nodiscard]] bool fits(const Placement& placement, const Shape& shape, int ranks);

// What part `part` has of a tensor of `shape`, in row-major order; nothing where the parts before
// it have all. The parts together have every element once. A tensor without elements is whole in
// part 0. `fits` holds.
[[nodiscard]] std::vector<Box> boxes_of_part(const Placement& placement, const Shape& shape,
                                             int part);

}  // namespace tessera
