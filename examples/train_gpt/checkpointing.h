// The checkpoints of a training: SAVE/step{N}, each a PyTorch distributed checkpoint of
// {"model": ..., "optim": ..., "trainer": ...}, or what one of OLMo's checkpointers makes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "options.h"
#include "tessera/comm.h"
#include "training.h"

// What a training has behind it; with the seed it also says where in the data it is.
struct Progress {
  std::int64_t step = 0;
  std::int64_t tokens = 0;
  std::string checkpoint;                  // the last one resumed from or saved; empty: none
  std::vector<std::string> warnings = {};  // about the other checkpoints, of that resume or save
};

// SAVE/step{N}
[[nodiscard]] std::string checkpoint_path(const Options& options, std::int64_t step);

// Tries whether --save can be written to, so that a training does not learn it at its first
// checkpoint: of an object store the error names the right that is lacking. Collective.
void require_place(const Options& options, tessera::Group& group);

// Loads model and optimizer in place from the checkpoint that --resume means: a directory, or for
// "latest" the newest one of --save that is whole (tessera/run_directory.h). Before the first
// checkpoint the answer is no progress, so that one command line serves the first start and every
// restart; it is `corrupt` when all that are there are damaged. That it is of another model is an
// error (`mismatch`) before any memory is written. Progress is what the optimizer's own steps say
// if a foreign program saved it. The optimizer's options are those of the checkpoint, and of a
// distributed checkpoint its groups, too, as in PyTorch. The kind is told by the files. Collective.
Progress resume_training(Training& training, const Options& options, tessera::Group& group);

// Writes the checkpoint of `progress`, notes it there and, when it is complete and verified,
// removes what --keep no longer wants. Collective.
void save_training(Training& training, Progress& progress, const Options& options,
                   tessera::Group& group);
