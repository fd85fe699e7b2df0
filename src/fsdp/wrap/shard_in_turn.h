// Several units that are made one after the other, or none of them.
#pragma once

#include <functional>
#include <vector>

#include "tessera/detail/slot.h"

namespace tessera::detail {

// What shard_modules makes one unit of.
struct UnitPlan {
  std::vector<UnitModule> modules;
  UnitSpec spec;
};

// Makes the units that `plan` gives, inner ones first. What is wrong with any of them is found out
// before the first is made, on all ranks of `mesh`, whose units they are. Later failures, of a
// param_init_fn or of a peer, leave those that were made. Collective.
void shard_in_turn(const Mesh& mesh, const std::function<std::vector<UnitPlan>()>& plan);

}  // namespace tessera::detail
