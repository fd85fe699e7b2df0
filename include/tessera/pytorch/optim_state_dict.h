// The optimizer state of sharded models: whole or in shards, by name or by number, and from any way
// of sharding to any other (PyTorch's FSDP.full_optim_state_dict and its like).
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
//     optimizer has. load_optimizer_state_dict takes this form.
// Whole and sharded trees are what `save` writes and PyTorch loads. All tensors are on the CPU.
//
// It works for FSDP1 with and without use_orig_params, fully_shard, replicate, and parameters in no
// unit, in any mixture, and with every optimizer that OptimizerRef knows. Scalars (0-dim tensors),
// numbers, strings and all else beside tensors travel too. Data moves one state of one unit at a
// time. Before any data moves, the ranks compare what they have: an error that one rank can find is
// thrown by all.
//
// A call marked collective is made by every rank of the group, also by ranks that get nothing.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// The parameters that an optimizer was made from. Deprecated, as in PyTorch: numbers of parameters
// are found without it, and each use logs PyTorch's warning.
using OptimInput = std::vector<std::vector<torch::Tensor>>;

// Saving --------------------------------------------------------------------------------------

struct FullOptimOptions {
  std::optional<OptimInput> optim_input = {};
  bool rank0_only = true;          // the other ranks get an empty dict
  std::optional<Mesh> group = {};  // unset: all ranks that the model's units know
};

// The whole state of `optim`, by name. Throws `mismatch` on every rank if the ranks' states do not
// agree. Collective.
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
// The kind, and which ranks get it, follows the model's state_dict_type
// (tessera/pytorch/state_dict.h). Keys that belong to no parameter are copied as they are, with a
// warning. If the input has no "param_groups", the output has none. Throws `unsupported` for the
// local kind. Collective.
[[nodiscard]] Value optim_state_dict(ModuleRef model, OptimizerRef optim,
                                     const OptimStateOptions& options = {});

// Loading -------------------------------------------------------------------------------------

// Whose state the result becomes. With neither `optim` nor `optim_input` it is the state of an
// optimizer on all parameters of the model.
struct OptimTarget {
  std::optional<OptimizerRef> optim = {};
  std::optional<OptimInput> optim_input = {};
  std::optional<Mesh> group = {};
};

// Returns this rank's part of a whole state. Local.
[[nodiscard]] Value shard_full_optim_state_dict(const Value& full, ModuleRef model,
                                                const OptimTarget& target = {});
// The same from rank 0's whole state; other ranks may give nothing. Collective.
[[nodiscard]] Value scatter_full_optim_state_dict(const std::optional<Value>& full, ModuleRef model,
                                                  const OptimTarget& target = {});
// The same from a sharded state that as many ranks made. Collective.
[[nodiscard]] Value flatten_sharded_optim_state_dict(const Value& sharded, ModuleRef model,
                                                     OptimizerRef optim,
                                                     const ShardedOptimOptions& options = {});

struct OptimLoadOptions {
  bool is_named_optimizer = false;  // parameters by name in the result, too
  bool load_directly = false;       // also give the result to load_optimizer_state_dict
  std::optional<Mesh> group = {};
};
// The kind is the model's state_dict_type. With rank0_only, rank 0's state counts. Collective,
// except for the whole kind without rank0_only.
Value optim_state_dict_to_load(ModuleRef model, OptimizerRef optim, const Value& state,
                               const OptimLoadOptions& options = {});

// Keys ----------------------------------------------------------------------------------------

enum class OptimStateKeyType : std::uint8_t { PARAM_NAME, PARAM_ID };

// Converts the keys of a whole state, of a model that is not sharded, to `key_type`. Lists of
// groups are sorted. Returns the same tree if it has such keys already. Throws `invalid_argument`
// for mixed keys.
[[nodiscard]] Value rekey_optim_state_dict(const Value& state, OptimStateKeyType key_type,
                                           ModuleRef model, const OptimTarget& target = {});

// An optimizer whose state has the names of its parameters in `model` as keys
// (torch.distributed.optim's _NamedOptimizer). It owns neither the model nor the optimizer.
class NamedOptimizer {
 public:
  NamedOptimizer(ModuleRef model, const OptimizerRef& optimizer);
  [[nodiscard]] Value state_dict() const { return optimizer_state_dict(ref_); }
  // Throws `mismatch` if a state lists other parameters or states than the optimizer has.
  void load_state_dict(const Value& state);
  operator const OptimizerRef&() const noexcept { return ref_; }  // NOLINT(*-explicit-*)

 private:
  OptimizerRef ref_;
};

// Makes every sharded tensor of a tree whole, from the same tree of all ranks. Collective.
[[nodiscard]] Value gather_state_dict(const Value& tree, const Mesh& mesh);

}  // namespace tessera
