// Whether what a restore has put into memory is what was saved, on whatever ranks and in whatever
// layout both were: by digests that the save left in the checkpoint.
#pragma once

#include "tessera/checkpoint.h"
#include "tessera/comm.h"
#include "tessera/restore.h"
#include "tessera/value.h"
#include "tessera/verify.h"

namespace tessera::detail {

// `tree`: what was loaded, each rank's own pieces. `checkpoint`: where from, under the tree's
// names. `loaded`: what that load summed. Tensors that were converted to another type, or have
// another name than they were saved under, are not compared, and of ranks that opened their own
// files alone only the model's. Throws `mismatch` naming the first tensor that differs. Collective.
void require_as_saved(const Value& tree, const GroupCheckpoint& checkpoint, int threads,
                      const LoadedSums& loaded, Group& group);

}  // namespace tessera::detail
