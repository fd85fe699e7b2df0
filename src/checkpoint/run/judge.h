// Whether checkpoints of a run are whole for all ranks: on a disk that they share, or on the disks
// of their nodes, of which each has the files of its own ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "tessera/comm.h"
#include "tessera/error.h"
#include "tessera/run_directory.h"

namespace tessera {

struct Judgement {
  std::optional<Error> fault;  // none: it is whole
  bool is_on_nodes = false;    // rank 0 does not see all of it, and every rank has its own files
};
// Rank 0 looks. If files of other ranks are missing there, each rank looks at its own. Every rank
// gets the answer. Throws on all ranks what says nothing about the checkpoint, such as a store that
// does not answer. Collective.
[[nodiscard]] Judgement judge(const Location& where, const RunCheck& check, Group& group);

// A step with a checkpoint that has its marker, where some rank looks.
struct SeenStep {
  std::int64_t step = 0;
  bool unsharded = false;
  bool is_left = false;  // rank 0 says so (steps.h)
  Location where;        // for this rank
};
// All that any rank sees, the newest first, the sharded one of a step before the unsharded one. A
// rank above 0 whose store does not answer sees none. Collective.
[[nodiscard]] std::vector<SeenStep> seen_steps(const Location& run, Group& group);

}  // namespace tessera
