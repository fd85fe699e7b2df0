// TrainingLoad: one state of a TrainingState in a load, from making room to taking what came.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "optim_state/optim_leaves.h"
#include "optim_state/training_tree.h"
#include "tessera/load_options.h"
#include "tessera/restore.h"
#include "tessera/stateful.h"

namespace tessera::detail {

class TrainingLoad {
 public:
  // `options` must outlive this. Throws `unsupported` for other names beside an optimizer.
  TrainingLoad(const Placed<TrainingState>& placed, const LoadOptions& options, int rank,
               int ranks);

  [[nodiscard]] const Path& place() const { return place_; }
  [[nodiscard]] const Value& model() const { return model_; }
  [[nodiscard]] LiveNames names();
  // The value "train" is this, and not of the tree.
  void take_trainer_state(const TrainerState& found);

  // Makes room in the optimizer. Returns the dict to load into.
  [[nodiscard]] Value prepare(const Checkpoint& contents);
  void undo();  // what prepare() has made
  void finish(Value loaded);
  // What the optimizer began afresh stands beside the keys that were not there.
  void report(LoadReport& report) const;

 private:
  [[nodiscard]] std::optional<Value> stored_of_rank(const Checkpoint& contents) const;

  TrainingState& state_;
  Path place_;
  const LoadOptions& options_;
  int rank_, ranks_;
  std::optional<OptimLeaves> optim_;
  Value model_;
  std::optional<Value> trainer_;
};

// Shows what a checkpoint holds below "model" where its tree is that of a model: it has neither
// "model" nor "optim", but some of the names of `model`. Collective.
void arrange_model_alone(GroupCheckpoint& checkpoint, const Value& model);

// Those of `state` and the others below it.
[[nodiscard]] std::vector<TrainingLoad> loads_of(TrainingState& state, const LoadOptions& options,
                                                 int rank, int ranks);
// Loads what they ask `contents` for by `load`, which fills a tree of theirs; a failure leaves
// their optimizers as they were. Collective.
LoadReport load_all(std::vector<TrainingLoad>& loads, const Checkpoint& contents, Group& group,
                    const std::function<LoadReport(Value& tree)>& load);

}  // namespace tessera::detail
