// The tree along which messages of many ranks travel.
//
// A rank's children lead the parts, as equal as can be, into which the ranks behind it are cut, so
// each subtree is a row of ranks without gaps and messages combine in rank order.
#pragma once

#include <vector>

#include "tessera/comm.h"

namespace tessera {

inline constexpr int kFanOut = 32;  // children of a rank at most

struct TreePlace {
  int parent = -1;            // -1: this is rank 0
  std::vector<int> children;  // ascending
};

// Of rank `rank` of `size` ranks.
[[nodiscard]] TreePlace place_in_tree(int rank, int size);

// What a fold along the tree gives rank 0: messages[r] is of rank r, and there is at least one.
[[nodiscard]] Bytes fold_along_tree(std::vector<Bytes> messages, const Combine& combine);

}  // namespace tessera
