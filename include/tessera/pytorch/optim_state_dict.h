// The optimizer state of sharded models: whole, in shards, by name and by number; between any two
// ways of sharding (PyTorch's FSDP.full_optim_state_dict and its like).
//
//   Value state = optim_state_dict(model, optimizer);               // by name, as the model's
//   ...                                                             // state_dict_type says
//   optim_state_dict_to_load(model, optimizer, state, {.load_directly = true});
//
// States are trees: {"state": {parameter: {"step", "exp_avg", ...}}, "param_groups": [{...,
// "params": [parameter, ...]}]}. There are three forms.
//   - whole: parameters by their names in the module, tensors in the parameters' shapes;
//   - sharded: the same, but the tensors of sharded parameters are this rank's rows
//     (torch.chunk along dimension 0, FSDP2 along the dimension that it shards);
//   - of one optimizer: parameters by number (or name), tensors in the shapes that this rank's
//     optimizer has; what load_optimizer_state_dict takes.
// Whole and sharded trees are what `save` writes and PyTorch loads. All tensors are on the CPU.
//
// It works for FSDP1 with and without use_orig_params, fully_shard, replicate, and parameters that
// no unit has, in any mixture, and with every optimizer that OptimizerRef knows; scalars (0-dim
// tensors), numbers, strings and what else there is beside tensors travels with them. Data moves
// one state of one unit at a time. What ranks have is compared before any data moves: errors that
// one rank can find are thrown by all.
//
// A call marked collective is made by every rank of the group, also by those that get nothing.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/module_ref.h"
#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace tessera {

// What an optimizer was made from. Deprecated, as in PyTorch: numbers of parameters are found
// without it, and each use logs PyTorch's warning.
using OptimInput = std::vector<std::vector<torch::Tensor>>;

// Saving --------------------------------------------------------------------------------------

struct FullOptimOptions {
  std::optional<OptimInput> optim_input = {};
  bool rank0_only = true;          // the other ranks get an empty dict
  std::optional<Mesh> group = {};  // unset: all ranks that the model's units know
};

// The whole state of `optim`, by name. Throws `mismatch` on every rank for what ranks have
// differently. Collective.
[[nodiscard]] Value full_optim_state_dict(ModuleRef model, OptimizerRef optim,
                                          const FullOptimOptions& options = {});

struct ShardedOptimOptions {
  std::optional<Mesh> group = {};
};
[[nodiscard]] Value sharded_optim_state_dict(ModuleRef model, OptimizerRef optim,
                                             const ShardedOptimOptions& options = {});

struct OptimStateOptions {
  std::optional<Value> optim_state_dict = {};  // unset: optimizer_state_dict(optim)
  std::optional<Mesh> group = {};
};
// The kind, and which ranks get it, is the model's state_dict_type (tessera/pytorch/state_dict.h).
// Keys that are of no parameter are copied as they are, with a warning; an input without
// "param_groups" gives an output without. Throws `unsupported` for the local kind. Collective.
[[nodiscard]] Value optim_state_dict(ModuleRef model, OptimizerRef optim,
                                     const OptimStateOptions& options = {});

// Loading -------------------------------------------------------------------------------------

// Whose state the result is to be. Without both: of an optimizer on all parameters of the model.
struct OptimTarget {
  std::optional<OptimizerRef> optim = {};
  std::optional<OptimInput> optim_input = {};
  std::optional<Mesh> group = {};
};

// This rank's part of a whole state. Local.
[[nodiscard]] Value shard_full_optim_state_dict(const Value& full, ModuleRef model,
                                                const OptimTarget& target = {});
// The same of rank 0's whole state; others may give nothing. Collective.
[[nodiscard]] Value scatter_full_optim_state_dict(const std::optional<Value>& full, ModuleRef model,
                                                  const OptimTarget& target = {});
// The same of a sharded state, made by as many ranks. Collective.
[[nodiscard]] Value flatten_sharded_optim_state_dict(const Value& sharded, ModuleRef model,
                                                     OptimizerRef optim,
                                                     const ShardedOptimOptions& options = {});

struct OptimLoadOptions {
  bool is_named_optimizer = false;  // parameters by name in the result too
  bool load_directly = false;       // and load_optimizer_state_dict of the result
  std::optional<Mesh> group = {};
};
// The kind is the model's state_dict_type; with rank0_only, rank 0's state counts. Collective but
// for the whole kind without rank0_only.
Value optim_state_dict_to_load(ModuleRef model, OptimizerRef optim, const Value& state,
                               const OptimLoadOptions& options = {});

// Keys ----------------------------------------------------------------------------------------

enum class OptimStateKeyType : std::uint8_t { PARAM_NAME, PARAM_ID };

// A whole state of a model that is not sharded with the other kind of keys; lists of groups are
// sorted. The same tree when it has them already. Throws `invalid_argument` for mixed keys.
[[nodiscard]] Value rekey_optim_state_dict(const Value& state, OptimStateKeyType key_type,
                                           ModuleRef model, const OptimTarget& target = {});

// An optimizer whose state is by the names of its parameters in `model`
// (torch.distributed.optim's _NamedOptimizer). Neither is owned.
class NamedOptimizer {
 public:
  NamedOptimizer(ModuleRef model, const OptimizerRef& optimizer);
  [[nodiscard]] Value state_dict() const { return optimizer_state_dict(ref_); }
  // Throws `mismatch` when a state lists other parameters or states than the optimizer has.
  void load_state_dict(const Value& state);
  operator const OptimizerRef&() const noexcept { return ref_; }  // NOLINT(*-explicit-*)

 private:
  OptimizerRef ref_;
};

// A tree in which every sharded tensor is whole, from the same tree of all ranks. Collective.
[[nodiscard]] Value gather_state_dict(const Value& tree, const Mesh& mesh);

}  // namespace tessera
