// The parameters and buffers of a model as a tree that checkpoints take.
#pragma once

#include "tessera/comm.h"
#include "tessera/parameter.h"
#include "tessera/save_options.h"
#include "tessera/value.h"

namespace tessera {

// {name: tensor} of all parameters and buffers (what was put into the module by set_data included),
// in the order of Python's state_dict(); a parameter that modules share is there under each of its
// names. Tensor leaves point into the memory of this rank's own rows: changing the tree's elements
// changes the model. Take a new tree for every save and load, between steps and not between a
// forward and its backward: taking it is what tells a unit that stays gathered that its shard may
// change. Throws `unsupported` for tensors that are not on the CPU.
[[nodiscard]] Value model_state(ModuleRef module);
// The same for a save. A buffer that mixed precision has cast is there as a copy in its own dtype,
// as full_state_dict has it.
[[nodiscard]] Value model_state_to_save(ModuleRef module);

}  // namespace tessera

namespace tessera::detail {

// Buffers that differ between ranks, of which a checkpoint has room for one.

// `state`, which model_state_to_save gave of `module`, or a part of it. All ranks get rank 0's
// values of a buffer in the state, not in the module, if some rank of `group` has others, and rank
// 0 warns of them in one text. So a save of any kind, whichever rank writes, has rank 0's. If rank
// 0's `copies` is another than `warn` the state stays as it is: the save refuses or keeps what
// differs. What rank 0 does not have at all is not compared. Collective.
[[nodiscard]] Value with_rank0_buffers(const Value& state, ModuleRef module, IfDiffers copies,
                                       Group& group);

}  // namespace tessera::detail
