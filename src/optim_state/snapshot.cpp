#include "tessera/snapshot.h"

#include "optim_state/training_load.h"
#include "optim_state/training_tree.h"
#include "optim_state/tree.h"

namespace tessera {

Snapshot::Snapshot(const TrainingState& state)
    : tree_(detail::host_copy(detail::tree_to_save(state, 0))) {}

void Snapshot::restore(TrainingState& state) const {
  const auto alone = solo_group();
  const LoadOptions options;
  auto loads = detail::loads_of(state, options, alone->rank(), alone->size());
  const auto contents = detail::checkpoint_of(tree_);
  detail::load_all(loads, contents, *alone,
                   [&](Value& tree) { return load(tree, contents, options, *alone); });
}

}  // namespace tessera
