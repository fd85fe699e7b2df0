// TrainingState: a model, its optimizer and values of the program, saved in one call and loaded in
// one call.
//
//   TrainingState state(model, optimizer);
//   state.values.set_item("step", step);
//   save(state, "run/step100", mesh.group());
//   ...
//   load(state, "run/step100", mesh.group());  // nothing else has to be called
//   step = state.values.at("step").as_int();
//
// The number of ranks, the way of sharding and the kind of the checkpoint may differ between the
// two. Saved as a DCP the state is what torch.distributed.checkpoint.state_dict.get_state_dict
// gives in Python, with the values beside "model" and "optim".
//
// Save and load between steps, not between a forward and its backward.
#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint.h"
#include "tessera/module_ref.h"
#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace tessera {

class TrainingState {
 public:
  // Of a model alone: for inference, or for a model whose optimizer begins afresh. The model and
  // the optimizer outlive this and are not owned. The optimizer is of any type that OptimizerRef
  // knows; all its parameters are the model's.
  explicit TrainingState(ModuleRef model) : model_(model) {}
  TrainingState(ModuleRef model, OptimizerRef optimizer)
      : model_(model), optimizer_(std::move(optimizer)) {}

  // A dict of what else belongs to the training: counters, a seed, a configuration. A load replaces
  // the values of the keys that are there, and throws `not_found` for one that the checkpoint
  // lacks. The keys "model" and "optim" are taken.
  Value values = Value::dict();
  // The dict of the checkpoint that holds everything, as in {"app": {"model": ..., "optim": ...}}.
  // Empty: "model" and "optim" stand at the root.
  std::string key;

  [[nodiscard]] ModuleRef model() const noexcept { return model_; }
  [[nodiscard]] const std::optional<OptimizerRef>& optimizer() const noexcept { return optimizer_; }

 private:
  ModuleRef model_;
  std::optional<OptimizerRef> optimizer_;
};

// save() of tessera/checkpoint.h of the state as a tree. Nothing is copied or gathered: every rank
// writes the parts that it holds. A parameter that had no step yet has no optimizer state to save.
// Throws `invalid_argument` for an optimizer with a parameter that is not one of the model's, and
// `unsupported` for tensors that are not on the CPU. Collective.
IoReport save(const TrainingState& state, const Location& where, const SaveOptions& options,
              Group& group);
IoReport save(const TrainingState& state, const Location& where, Group& group);

// load() of tessera/checkpoint.h into the memory of the model and of the optimizer, whose options
// become those of the checkpoint. Optimizer state is found by the names of parameters: their order
// and the way of sharding do not matter, but the groups hold the same parameters. Throws what
// load() throws and `mismatch` for other groups, before anything is changed; a failure after the
// beginning leaves the model and the optimizer's state with undefined content. Collective.
LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group);
LoadReport load(TrainingState& state, const Location& where, Group& group);

}  // namespace tessera
