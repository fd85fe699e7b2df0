// Who of N ranks writes what of a tensor. Pure integers: every rank computes it for all.
#pragma once

#include <vector>

#include "tessera/layout.h"

namespace tessera {

struct Sharer {
  int rank = 0;
  int ranks = 1;
  // Whose file it is: what this rank holds of a tensor it writes itself. -1: the file is
  // everybody's, and ranks that hold the same share it.
  int owner = -1;
};

// The boxes of a tensor with this placement that the rank writes into a file that gets all of it.
// Of all ranks together they have every element once. `fits` holds (placement.h).
[[nodiscard]] std::vector<Box> boxes_to_write(const Placement& placement, const Shape& shape,
                                              const Sharer& sharer);

// The ranks that hold the same part as `rank`: how many there are, and which of them it is.
struct Holders {
  int count = 1;
  int index = 0;
};
[[nodiscard]] Holders holders_of(const Placement& placement, int rank, int ranks);

}  // namespace tessera
