// The state of a training run as a tree that checkpoints take, with PyTorch's own names.
//
//   Value state = Value::dict({{"model", model_state(model)}, {"optim", optim_state(optimizer)}});
//   save(state, "checkpoint", mesh.group());
//   ...
//   load(state, "checkpoint", mesh.group());   // into the memory of the parameters and the
//   optimizer set_optim_state(optimizer, state.at("optim"));
//
// Saved as a DCP, the tree is what torch.distributed.checkpoint.state_dict.get_state_dict gives for
// fully_shard and AdamW. Tensor leaves point into the memory of this rank's own rows: changing the
// tree's elements changes the model. Take a new tree for every save and load, between steps
// and not between a forward and its backward: taking it is what tells a unit that stays gathered
// that its shard may change.
#pragma once

#include "tessera/module_ref.h"
#include "tessera/optim.h"
#include "tessera/value.h"

namespace tessera {

// {name: tensor} of all parameters and buffers (what was put into the module by set_data included),
// in the order of Python's state_dict(); a parameter that modules share is there under each of its
// names. Throws `unsupported` for tensors that are not on the CPU.
[[nodiscard]] Value model_state(ModuleRef module);

// {"state": {name: {"step", "exp_avg", "exp_avg_sq"}}, "param_groups": [{"lr", "betas", ...,
// "params": [name, ...]}]}. Makes the state of parameters that have had no step yet.
[[nodiscard]] Value optim_state(AdamW& optimizer);

// Takes over what a load replaced in the tree of optim_state: the options of the groups. Throws
// `mismatch` when the groups hold other parameters and `unsupported` for an option that AdamW here
// does not have (amsgrad, maximize).
void set_optim_state(AdamW& optimizer, const Value& tree);

}  // namespace tessera
