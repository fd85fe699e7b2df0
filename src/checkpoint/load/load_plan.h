// What one rank's load will do, decided before it touches the tree.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "checkpoint/load/differences.h"
#include "checkpoint/load/fill.h"
#include "checkpoint/load/opened.h"
#include "tessera/checkpoint.h"
#include "tessera/leaf.h"

namespace tessera {

struct LoadPlan {
  std::vector<Filling> fillings;
  Owners owners;                               // of the fillings; found once all of them fit
  std::vector<std::pair<Path, Value>> values;  // to be put into the tree at the end
  Differences differences;                     // missing and unfit keys
  std::vector<std::size_t> untaken;            // leaves of the checkpoint, ascending
};

// Matches the leaves of the tree with those of the checkpoint (checkpoint-rows P-16). Throws only
// for a tree into which nothing could be loaded: one whose memory is not what its pieces say.
// Leaves of the checkpoint that hold nothing (empty dicts) count as taken.
[[nodiscard]] LoadPlan plan_load(const Value& tree, LoadSource& source, const LoadOptions& options);

}  // namespace tessera
