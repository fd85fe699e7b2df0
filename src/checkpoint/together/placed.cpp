#include "checkpoint/together/placed.h"

#include <utility>

#include "checkpoint/read/memory.h"
#include "checkpoint/save/opening.h"
#include "tessera/error.h"

namespace tessera {
namespace {

PlannedLeaf planned_alone(const Leaf& leaf) {
  Tensor tensor = leaf.value.as_tensor();
  tensor.sharded = false;
  tensor.placement.reset();
  return planned({leaf.name, leaf.path, Value(std::move(tensor))}, 0, 1);
}

}  // namespace

PlacedTensors::PlacedTensors(const std::vector<const Leaf*>& leaves, int rank, int ranks) {
  std::vector<PlannedLeaf> planned_leaves;
  for (const Leaf* leaf : leaves) {
    require_readable(leaf->value.as_tensor(), leaf->name);
    PlannedLeaf plan = ranks == 1 ? planned_alone(*leaf) : planned(*leaf, rank, ranks);
    if (!plan.placement) {
      throw Error(ErrorCode::unsupported,
                  "ranks cannot compute which part of the tensor the others hold: save DCP")
          .at_key(leaf->name);
    }
    by_leaf_.emplace(leaf, all_.size());
    all_.push_back({leaf, *plan.placement});
    planned_leaves.push_back(std::move(plan));
  }
  digest_ = digest_of(planned_leaves);
}

}  // namespace tessera
