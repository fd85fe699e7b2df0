// The trainer's state in the files of a checkpoint (checkpoint-rows O-41, O-51, O-61, O-73).
#pragma once

#include <string>

#include "tessera/checkpoint.h"
#include "tessera/checkpointer.h"
#include "tessera/value.h"

namespace tessera::detail {

// What is called `name` in the directory or the store at `where`.
[[nodiscard]] Location inside(const Location& where, const std::string& name);

struct TrainerState {
  Value state;
  std::string warning;  // empty: none
};

// That of rank `rank` of `world` in a checkpoint that `saved_by` ranks saved: its own, or on
// another number of ranks rank 0's without "rng". Of `full` everybody's, with a derived "rng" on
// ranks above 0. Throws `incomplete` where the file is missing.
[[nodiscard]] TrainerState trainer_state_in(const Location& where, CheckpointerKind kind,
                                            int saved_by, int rank, int world);

}  // namespace tessera::detail
