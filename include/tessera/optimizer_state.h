// The optimizer's state of a checkpoint, before there is an optimizer: PyTorch's
// torch.distributed.checkpoint.optimizer.
//
//   Value loaded = load_sharded_optimizer_state_dict("optim", "run/step100", group);
//
// An optimizer gets what lies under the key by set_optimizer_state_dict
// (tessera/pytorch/distributed_state_dict.h) or by optim_state_dict_to_load, with a state_dict_type
// of the sharded kind (tessera/pytorch/optim_state_dict.h).
#pragma once

#include <string>

#include "tessera/checkpoint.h"

namespace [[gnu::visibility("default")]] tessera {

// Loads what the checkpoint has under `optimizer_key`, a key at the top of its tree, and returns it
// as a tree {optimizer_key: ...}. Values are as they are in the checkpoint. Tensors have memory
// that the tree owns: one of a single element is whole on every rank; of every other a rank has the
// part that torch.chunk gives it of dimension 0, cut over the ranks of `group`, or no piece if
// there is none for it. Who saved it, on how many ranks and how sharded, does not matter.
//
// PyTorch's function takes the model's state too, from which it learns how tensor parallelism has
// cut the parameters; here nothing cuts them so.
//
// Throws `not_found` for a key that the tree does not have at its top, and what load() throws.
// `rename` of the options is `invalid_argument`. Collective over `group`.
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Location& where,
                                                      const LoadOptions& options, Group& group);
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Location& where, Group& group);
// The same from a checkpoint that every rank has opened, or that map() returned.
[[nodiscard]] Value load_sharded_optimizer_state_dict(const std::string& optimizer_key,
                                                      const Checkpoint& checkpoint,
                                                      const LoadOptions& options, Group& group);

}  // namespace tessera
