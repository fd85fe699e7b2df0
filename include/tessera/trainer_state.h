// The trainer's state of an OLMo checkpoint: random numbers, the place in the data, counts of
// steps.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

struct TrainerState {
  // A tree that owns its memory. None: no rank has saved one.
  std::optional<Value> state;
  // What this rank does not have of its own, in sentences. They go to the log as well.
  std::vector<std::string> warnings;
};

// Each rank gets what it has saved itself, where the checkpoint is of as many ranks as `group`:
// from `train/rank{r}.pt`, or of olmo-legacy what stands beside "model" and "optim" in
// `rank{r}.pt`. Else all get rank 0's without "rng", and a warning: equal random numbers on all
// ranks are worse than fresh ones. An olmo-full checkpoint has one state, in `train.pt` or, if that
// is absent, in `other.pt`: rank 0 gets it whole, the others without "rng".
//
// No rank ever gets another one's random numbers. By default each rank opens its own file alone;
// where all get rank 0's, rank 0 alone reads. With LoadReader::rank_zero it reads for all.
//
// Throws
//   `incomplete`   ranks have saved a state, but not this one's file: it names rank and file
//   `mismatch`     the states of two ranks are of different steps ("global_step")
//   `not_found`    there is no checkpoint
//   `unsupported`  of another kind: its trainer's state is a part of its tree
// Collective.
[[nodiscard]] TrainerState trainer_state(const Location& where, const LoadOptions& options,
                                         Group& group);

}  // namespace tessera
