// TrainingState: a model, its optimizer and the program's own values, saved and loaded in one call.
//
//   TrainingState state(model, optimizer);
//   state.values.set_item("step", step);
//   save(state, "run/step100");
//   ...
//   load(state, "run/step100");  // nothing else has to be called
//   step = state.values.at("step").as_int();
//
// Ranks, sharding and kind may change between the two. A DCP checkpoint is what Python's
// get_state_dict gives, the values beside "model" and "optim". Save and load between whole steps.
#pragma once

#include <optional>
#include <string>

#include "tessera/checkpoint.h"
#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

class TrainingState {
 public:
  // Without an optimizer: for inference, or for a new one. Both must outlive this object.
  explicit TrainingState(ModuleRef model) : model_(model) {}
  TrainingState(ModuleRef model, OptimizerRef optimizer)
      : model_(model), optimizer_(std::move(optimizer)) {}

  // What else belongs to the training, a dict: counters, a configuration. Numbers and whole tensors
  // that ranks have differently are `mismatch`. A load replaces its keys' values, {} and none by
  // all that is there; `not_found`: nothing is. "model", "optim" and "rank_values" are taken.
  Value values = Value::dict();
  // The same of each rank's own (random_state(), its place in the data), by its number. Ranks
  // beyond those that saved keep what they have; fewer leave the others'. Both are warned of.
  Value rank_values = Value::dict();
  std::string key;            // under which the checkpoint holds everything; empty: under none
  Value::List other_options;  // by group: what the optimizer did not know in a load; saved again
  std::vector<TrainingState> others;  // of further models, each under its own `key` below this one

  [[nodiscard]] ModuleRef model() const noexcept { return model_; }
  [[nodiscard]] const std::optional<OptimizerRef>& optimizer() const noexcept { return optimizer_; }

 private:
  ModuleRef model_;
  std::optional<OptimizerRef> optimizer_;
};

// Saves the state as a tree, with save() of tessera/checkpoint.h: every rank writes its parts. A
// parameter without a step has no optimizer state. Without a group the ranks are those that a model
// is sharded over, or this process alone. Throws `invalid_argument` if the optimizer has parameters
// that are not the model's or two things have one key, `unsupported` for tensors on other devices
// than the CPU and CUDA's, and for a `key` or others in one of OLMo's kinds. Collective.
SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options,
                Group& group);
SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options = {});
SaveResult save(const TrainingState& state, const Location& where, Group& group);

// Loads into the memory of model and optimizer, whose options become the checkpoint's; state is
// found by the names of parameters. A checkpoint with neither "model" nor "optim" is a model alone,
// as torch::save of a module writes it. Groups must hold the same; where missing ones are reported,
// new groups may stand behind. Of OLMo's kinds, without a `key` or others, names and groups are
// found as tessera/restore.h says, and the value "train" is a rank's own trainer state. Throws what
// these and load() throw, `mismatch` for other groups, `unsupported` for LoadOptions::rename beside
// an optimizer, before anything is changed. A later failure leaves no values in either. Collective.
LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group);
LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options = {});
LoadReport load(TrainingState& state, const Location& where, Group& group);

// A model and its optimizer in files of their own, as torch::save writes them. State that goes by
// numbers is that of the parameters in the order of the groups here (in flat ones: that of the
// model), which have to be as many, of as many parameters; a tied one counts once, also where a
// group has it twice. Values stay as they are; a key or others are `unsupported`. Collective.
//
//   TrainingState state(model, optimizer);
//   load(state, {.model = "net.pt", .optimizer = "opt.pt"});
struct StateFiles {
  Location model, optimizer;
};
LoadReport load(TrainingState& state, const StateFiles& files, const LoadOptions& options,
                Group& group);
LoadReport load(TrainingState& state, const StateFiles& files, const LoadOptions& options = {});

// Both in one call, as a TrainingState without values. Python's torch.load takes a ".pt", its
// torch.distributed.checkpoint a directory. Collective for sharded models.
SaveResult save(ModuleRef model, OptimizerRef optimizer, const Location& where,
                const SaveOptions& options = {});
LoadReport load(ModuleRef model, OptimizerRef optimizer, const Location& where,
                const LoadOptions& options = {});

}  // namespace tessera
