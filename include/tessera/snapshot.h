// Snapshot: a training state kept in memory, to go back to when a step went wrong.
//
//   TrainingState state(model, optimizer);
//   const Snapshot good(state);  // this rank's part of everything
//   ...
//   if (!std::isfinite(loss.item<double>())) good.restore(state);
//
// Nothing is communicated: each rank keeps and restores what it holds, so all ranks take one at the
// same step and go back together. Take it and restore it between whole steps.
#pragma once

#include "tessera/training_state.h"

namespace [[gnu::visibility("default")]] tessera {

class Snapshot {
 public:
  // Copies into the host's memory what save() would write of this rank's: the model's rows and
  // buffers, the optimizer's state and options, values and rank_values, of `others` too. Throws
  // what save() throws of the state itself.
  explicit Snapshot(const TrainingState& state);
  // Gives all that back, any number of times. The state holds the same model, sharded the same way
  // over the same ranks, and values of the same keys. Throws what load() throws for others.
  void restore(TrainingState& state) const;

 private:
  Value tree_;
};

}  // namespace tessera
