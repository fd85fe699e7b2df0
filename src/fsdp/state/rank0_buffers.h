// Buffers that differ between ranks, of which a checkpoint has room for one.
#pragma once

#include "tessera/comm.h"
#include "tessera/module_ref.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace tessera::detail {

// `state`, which model_state_to_save gave of `module`, or a part of it. Where rank 0 of `group` has
// other values in a buffer than some rank, all get its values in the state, not in the module, and
// rank 0 warns of them in one text. So a save of any kind, whichever rank writes, has rank 0's. If
// rank 0's `copies` is another than `warn` the state stays as it is: the save refuses or keeps
// what differs. What rank 0 does not have at all is not compared. Collective.
[[nodiscard]] Value with_rank0_buffers(const Value& state, ModuleRef module, IfDiffers copies,
                                       Group& group);

}  // namespace tessera::detail
