#include "tessera/training_state.h"

#include <algorithm>
#include <utility>

#include "checkpoint/open/kinds.h"
#include "fsdp/state/model_state.h"
#include "optim_state/optim_leaves.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/group_checkpoint.h"
#include "tessera/restore.h"
#include "tessera/trainer_state.h"

namespace tessera {
namespace {

using detail::OptimLeaves;

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kGroups = "param_groups";
constexpr const char* kTrain = "train";  // of OLMo's kinds

std::optional<OptimLeaves> leaves_of_optimizer(const TrainingState& state) {
  if (!state.optimizer()) return std::nullopt;
  return OptimLeaves(state.model(), *state.optimizer());
}

Path place_of_optim(const TrainingState& state) {
  Path place;
  if (!state.key.empty()) place.emplace_back(state.key);
  place.emplace_back(kOptim);
  return place;
}

void require_free(const Value& key) {
  for (const auto* taken : {kModel, kOptim}) {
    if (key == Value(taken))
      throw Error(ErrorCode::invalid_argument, "this key of the values is the state's own")
          .at_key(taken);
  }
}

// Everything. `optim`: of the optimizer, if there is one.
Value tree_of(const TrainingState& state, const Value& model, std::optional<Value> optim) {
  auto tree = Value::dict({{kModel, model}});
  if (optim) tree.set_item(kOptim, std::move(*optim));
  for (const auto& [key, value] : state.values.pairs()) {
    require_free(key);
    tree.set_item(key, value);
  }
  return state.key.empty() ? tree : Value::dict({{state.key, std::move(tree)}});
}

// What an optimizer does not know of its groups goes back where it was.
Value with_other_options(Value optim, const Value::List& others) {
  auto& groups = optim.at(kGroups).items();
  for (std::size_t g = 0; g < std::min(groups.size(), others.size()); ++g) {
    for (const auto& [key, value] : others[g].pairs()) {
      if (groups[g].find_key(key) == nullptr) groups[g].set_item(key, value);
    }
  }
  return optim;
}

// What an optimizer gets ready for is found by the checkpoint's own names.
void require_own_names(const TrainingState& state, const LoadOptions& options) {
  if (!options.rename || !state.optimizer()) return;
  throw Error(ErrorCode::unsupported, "other names for the keys of a state with an optimizer");
}

// What a load has put in the place of `values`.
Value loaded_values(const Value& values, const Value& loaded) {
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : values.pairs()) pairs.emplace_back(key, *loaded.find_key(key));
  return Value::dict(std::move(pairs));
}

// What one load is made of.
class TrainingLoad {
 public:
  TrainingLoad(TrainingState& state, const LoadOptions& options) : state_(state) {
    require_own_names(state, options);
    optim_ = leaves_of_optimizer(state);
    model_ = model_state(state.model());
  }

  [[nodiscard]] const Value& model() const { return model_; }
  [[nodiscard]] LiveNames names() {
    LiveNames live;
    for (const auto& pair : model_.pairs()) live.names.push_back(pair.first.as_string());
    if (optim_) live.groups = optim_->tree().at(kGroups);
    return live;
  }

  // Makes room in the optimizer, and the tree to load into.
  void prepare(const Checkpoint& contents) {
    std::optional<Value> optim;
    if (optim_) {
      const auto stored = detail::stored_part(contents, place_of_optim(state_));
      optim_->prepare(stored);
      optim = optim_->tree_like(stored);
    }
    tree_ = tree_of(state_, model_, std::move(optim));
    if (trainer_) tree_.erase(kTrain);
  }
  // The value "train" is this, and not of the tree.
  void take_trainer_state(const TrainerState& found) {
    if (!found.state) {
      throw Error(ErrorCode::not_found, "the checkpoint has no trainer's state").at_key(kTrain);
    }
    trainer_ = found.state;
  }
  [[nodiscard]] Value& tree() { return tree_; }

  void finish() {
    Value loaded = state_.key.empty() ? tree_ : tree_.at(state_.key);
    if (optim_) state_.other_options = optim_->finish(loaded.at(kOptim));
    if (trainer_) loaded.set_item(kTrain, *trainer_);
    state_.values = loaded_values(state_.values, loaded);
  }
  void undo() {
    if (optim_) optim_->undo();
  }

 private:
  TrainingState& state_;
  std::optional<OptimLeaves> optim_;
  Value model_, tree_;
  std::optional<Value> trainer_;
};

// Ranks that have saved just these parts themselves open their own files alone. Names that the
// caller gives, and a state below a key, are taken as they are.
GroupCheckpoint opened(const TrainingState& state, const TrainingLoad& job, const Location& where,
                       const LoadOptions& options, Group& group) {
  if (!state.key.empty() || options.rename) return GroupCheckpoint::open(where, options, group);
  return GroupCheckpoint::open(where, job.model(), options, group);
}

}  // namespace

SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options,
                Group& group) {
  Value tree;
  agree(group, "taking a training state", [&] {
    auto leaves = leaves_of_optimizer(state);
    std::optional<Value> optim;
    if (leaves) optim = with_other_options(leaves->tree(), state.other_options);
    tree = tree_of(state, model_state_to_save(state.model()), std::move(optim));
  });
  return save(tree, where, options, group);
}

SaveResult save(const TrainingState& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group) {
  std::optional<TrainingLoad> job;
  agree(group, "preparing to load a training state", [&] { job.emplace(state, options); });
  auto checkpoint = opened(state, *job, where, options, group);
  if (is_olmo_kind(checkpoint.contents().kind) && state.key.empty() && !options.rename) {
    const auto live = job->names();
    checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
    if (state.values.find(kTrain) != nullptr)
      job->take_trainer_state(trainer_state(where, options, group));
  }
  LoadReport report;
  try {
    agree(group, "preparing to load a training state",
          [&] { job->prepare(checkpoint.contents()); });
    report = checkpoint.load(job->tree(), options);
  } catch (...) {
    job->undo();
    throw;
  }
  job->finish();
  return report;
}

LoadReport load(TrainingState& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

}  // namespace tessera
