// The states of a model and its optimizers by name, whatever shards them: PyTorch's
// torch.distributed.checkpoint.state_dict.
//
//   auto [model_state, optim_state] = get_state_dict(model, optimizer);
//   Value state = Value::dict({{"model", model_state}, {"optim", optim_state}});
//   save(state, "run/step100", mesh.checkpoint_group());
//   ...
//   load(state, "run/step100", mesh.checkpoint_group());  // into the memory of what get gave
//   set_state_dict(model, optimizer, state.at("model"), state.at("optim"));
//
// PyTorch's functions of these names load what these save, and the other way round. A program that
// needs neither the options nor the trees themselves is better served by TrainingState
// (tessera/training_state.h), which copies and gathers nothing.
//
// States are those of tessera/pytorch/state_dict.h and tessera/pytorch/optim_state_dict.h: sharded
// or, by an option, whole. A parameter that modules share is under each of its names in the state
// of the model, and under the first in that of the optimizer; when states are set, any will do.
//
// All functions are collective, with the same options on all ranks, and are called between steps.
// What one rank finds wrong with a state that is set, all ranks throw.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tessera/mesh.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// PyTorch's StateDictOptions. `dsd_fqn_modifiers` is not among them: it names a method by which a
// Python module says that its state dict has other names than the module, and C++ modules have no
// such hooks.
struct DistributedStateDictOptions {
  bool full_state_dict = false;  // whole tensors, instead of this rank's chunks
  // Tensors on the CPU, as those of an optimizer always are. With `full_state_dict` rank 0 alone
  // gets the state, the others an empty dict; and when it is set, rank 0's counts.
  bool cpu_offload = false;
  bool ignore_frozen_params = false;  // get: leaves parameters out that require no gradient
  // get: of a state of `submodules` the names begin with theirs. Deprecated in PyTorch.
  bool keep_submodule_prefixes = true;
  // set: the state has all names of the model and no others, and a state for each parameter that
  // the optimizer trains. Otherwise what is missing stays as it is in the model, and as it is
  // before the first step in the optimizer.
  bool strict = true;
  bool broadcast_from_rank0 = false;  // set: rank 0's whole state counts; needs `full_state_dict`
  // get: the optimizer's state as one dict of `state.{parameter}.{entry}` and
  // `param_groups.{parameter}.{option}`. Setting takes either form.
  bool flatten_optimizer_state_dict = false;

  // get: of these modules below the model alone; empty: of the model. PyTorch has it as an
  // argument. It does not concern optimizers.
  std::vector<std::shared_ptr<torch::nn::Module>> submodules = {};
  // Who takes part. Unset: all ranks that the model's units know, or this one alone.
  std::optional<Mesh> group = {};
};

// One optimizer or several, made from the argument: `adam` or `{adam, sgd}`.
class OptimizerRefs {
 public:
  template <std::convertible_to<OptimizerRef> Optimizer>
  OptimizerRefs(Optimizer&& optimizer)  // NOLINT(*-explicit-*,*-forwarding-*)
      : refs_{OptimizerRef(std::forward<Optimizer>(optimizer))} {}
  OptimizerRefs(std::initializer_list<OptimizerRef> refs) : refs_(refs) {}
  OptimizerRefs(std::vector<OptimizerRef> refs) : refs_(std::move(refs)) {}  // NOLINT(*-explicit-*)

  [[nodiscard]] const std::vector<OptimizerRef>& all() const noexcept { return refs_; }

 private:
  std::vector<OptimizerRef> refs_;
};

// {name: tensor} of parameters and buffers. Chunks of fully_shard's units, and tensors that nobody
// shards, are the model's own memory; all else is copied. Throws `invalid_argument` for a model
// without any and for a module that is not below the model, and `conflict` for two names that are
// equal without the modules'.
[[nodiscard]] Value get_model_state_dict(ModuleRef model,
                                         const DistributedStateDictOptions& options = {});

// {"state": {name: {entry: value}}, "param_groups": [...]} of all optimizers together, copied.
// Zeros stand for the state of an optimizer that has none on any rank, as before its first step
// (OptimizerAccess::first_state), so that there is memory to load into; the optimizer stays as it
// is. PyTorch makes a step for that, after which Adam has counted it. Throws what
// full_optim_state_dict does, `conflict` for a parameter that two optimizers have, and with flat
// keys `unsupported` for a state that is neither a tensor nor a number nor a dict.
[[nodiscard]] Value get_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                             const DistributedStateDictOptions& options = {});

// Both: the model's, the optimizers'.
[[nodiscard]] std::pair<Value, Value> get_state_dict(
    ModuleRef model, const OptimizerRefs& optimizers,
    const DistributedStateDictOptions& options = {});

// What a model and a state that was set do not have in common; empty if the options are strict.
struct IncompatibleKeys {
  std::vector<std::string> missing_keys;     // of the model; the state lacks them
  std::vector<std::string> unexpected_keys;  // of the state; the model lacks them
};

// Gives the model its state. Nothing is changed if it throws `mismatch` for names, shapes or parts
// that do not fit (a sharded state must come from as many ranks: resharding goes through a
// checkpoint), or `invalid_argument` for an empty state, for one of flat parameters
// ("..._flat_param"), and for options that contradict each other.
IncompatibleKeys set_model_state_dict(ModuleRef model, const Value& state,
                                      const DistributedStateDictOptions& options = {});

// Gives each optimizer what the state has of its parameters, wherever the state's groups have them.
// An optimizer needs no state before that: it is made of what is loaded. Nothing is changed if it
// throws
//   `mismatch`          a parameter without a state (if strict); parameters of one group of the
//                       optimizer have different options in the state, or none; a shape differs
//   `invalid_argument`  an empty state, one that is not by name, options that contradict each other
//   `unsupported`       options that an optimizer cannot have.
// An optimizer that never has states, such as SGD without momentum, misses none.
void set_optimizer_state_dict(ModuleRef model, const OptimizerRefs& optimizers, const Value& state,
                              const DistributedStateDictOptions& options = {});

// Both; nothing is changed if either throws. An empty model_state leaves the model alone.
IncompatibleKeys set_state_dict(ModuleRef model, const OptimizerRefs& optimizers,
                                const Value& model_state, const Value& optim_state,
                                const DistributedStateDictOptions& options = {});

}  // namespace tessera
