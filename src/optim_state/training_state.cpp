#include "tessera/training_state.h"

#include <algorithm>
#include <utility>

#include "base/digest.h"
#include "base/log.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/tree/tree.h"
#include "comm/text.h"
#include "comm/whereabouts.h"
#include "fsdp/state/model_state.h"
#include "optim_state/optim_leaves.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/group_checkpoint.h"
#include "tessera/restore.h"
#include "tessera/trainer_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::OptimLeaves;

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kGroups = "param_groups";
constexpr const char* kRanks = "rank_values";
constexpr const char* kTrain = "train";  // of OLMo's kinds

std::optional<OptimLeaves> leaves_of_optimizer(const TrainingState& state) {
  if (!state.optimizer()) return std::nullopt;
  return OptimLeaves(state.model(), *state.optimizer());
}

Path place_of(const TrainingState& state, const std::string& key) {
  Path place;
  if (!state.key.empty()) place.emplace_back(state.key);
  place.emplace_back(key);
  return place;
}

void require_free(const Value& key) {
  for (const auto* taken : {kModel, kOptim, kRanks}) {
    if (key == Value(taken))
      throw Error(ErrorCode::invalid_argument, "this key of the values is the state's own")
          .at_key(taken);
  }
}

// Everything. `optim`: of the optimizer, if there is one; `ranks`: what belongs to single ones.
Value tree_of(const TrainingState& state, const Value& model, std::optional<Value> optim,
              std::optional<Value> ranks) {
  auto tree = Value::dict({{kModel, model}});
  if (optim) tree.set_item(kOptim, std::move(*optim));
  if (ranks) tree.set_item(kRanks, std::move(*ranks));
  for (const auto& [key, value] : state.values.pairs()) {
    require_free(key);
    tree.set_item(key, value);
  }
  return state.key.empty() ? tree : Value::dict({{state.key, std::move(tree)}});
}

bool has_values(const Value& dict) {
  return !dict.pairs().empty();
}

// A line for each tensor that this rank has whole: of such the first rank's is saved.
std::string described_tensors(const Value& values) {
  std::string text;
  for (const auto& leaf : leaves_of(values)) {
    if (!leaf.value.is(Value::Kind::tensor) || !is_whole_in_memory(leaf.value.as_tensor()))
      continue;
    const auto tensor = tensor_of(leaf.value.as_tensor()).contiguous();
    const auto digest =
        digest64({static_cast<const std::byte*>(tensor.const_data_ptr()), tensor.nbytes()});
    text += leaf.name + " " + std::to_string(digest) + "\n";
  }
  return text;
}

// The path in the first line that differs.
std::string first_difference(const std::string& a, const std::string& b) {
  const auto at = std::ranges::mismatch(a, b).in1 - a.begin();
  const auto begin = a.rfind('\n', at) == std::string::npos ? 0 : a.rfind('\n', at) + 1;
  return a.substr(begin, a.find(' ', begin) - begin);
}

// `mine`: described_tensors of this rank's values. Collective.
void require_same_tensors(const std::string& mine, Group& group) {
  const Purpose purpose("comparing tensors among the values");
  const auto all = group.all_gather(to_bytes(mine));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    if (all[rank] == all[0]) continue;
    throw Error(ErrorCode::mismatch,
                "ranks 0 and " + std::to_string(rank) +
                    " have different tensors in TrainingState::values, of which one is saved for "
                    "all: what each rank has for itself belongs into rank_values")
        .at_key(first_difference(to_text(all[0]), to_text(all[rank])));
  }
}

std::string key_of(int rank) {
  return std::to_string(rank);
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

// Empty dicts of `value`, which lies at `place`, become what takes all that the checkpoint has
// there.
Value asking(const Value& value, const Path& place, const Checkpoint& contents) {
  if (!value.is(Value::Kind::dict)) return value;
  if (!has_values(value)) {
    const bool is_there = std::ranges::any_of(
        contents.leaves, [&](const Leaf& leaf) { return part_below(leaf, place).has_value(); });
    return is_there ? Value() : value;
  }
  auto asked = Value::dict({}, value.dict_kind());
  for (const auto& [key, child] : value.pairs()) {
    auto inside = place;
    const bool has_step = key.is(Value::Kind::string);
    if (has_step) inside.emplace_back(key.as_string());
    asked.set_item(key, has_step ? asking(child, inside, contents) : child);
  }
  return asked;
}

// What one load is made of.
class TrainingLoad {
 public:
  TrainingLoad(TrainingState& state, const LoadOptions& options, const Group& group)
      : state_(state), options_(options), rank_(group.rank()), ranks_(group.size()) {
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
      const auto stored = detail::stored_part(contents, place_of(state_, kOptim));
      optim_->prepare(stored, options_.missing);
      optim = optim_->tree_like(stored);
    }
    tree_ = tree_of(state_, model_, std::move(optim), stored_of_rank(contents));
    Value inner = state_.key.empty() ? tree_ : tree_.at(state_.key);
    for (const auto& [key, value] : state_.values.pairs()) {
      // Under other names a none takes nothing.
      if (key.is(Value::Kind::string) && !options_.rename)
        inner.set_item(key, asking(value, place_of(state_, key.as_string()), contents));
    }
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
    if (const auto* ranks = loaded.find(kRanks))
      state_.rank_values = loaded_values(state_.rank_values, ranks->at(key_of(rank_)));
  }
  void undo() {
    if (optim_) optim_->undo();
  }
  // What the optimizer began afresh stands beside the keys that were not there.
  void report(LoadReport& report) const {
    if (!optim_) return;
    auto place = place_of(state_, kOptim);
    place.emplace_back("state");
    for (const auto& name : optim_->missing()) {
      auto of_parameter = place;
      of_parameter.emplace_back(name);
      report.missing.push_back(dotted(of_parameter));
    }
    std::ranges::sort(report.missing);
  }

 private:
  // What this rank loads of its own; nothing where the checkpoint has no such rank.
  [[nodiscard]] std::optional<Value> stored_of_rank(const Checkpoint& contents) const {
    if (!has_values(state_.rank_values)) return std::nullopt;
    auto place = place_of(state_, kRanks);
    const auto stored = detail::stored_part(contents, place);
    const auto saved = static_cast<int>(stored.pairs().size());
    if (saved != ranks_) {
      log_of_all(LogLevel::warning, "values of " + std::to_string(saved) + " ranks are loaded by " +
                                        std::to_string(ranks_) +
                                        (saved < ranks_ ? ": those behind keep what they have"
                                                        : ": those of the others are left"));
    }
    if (saved > 0 && rank_ >= saved) return std::nullopt;
    place.emplace_back(key_of(rank_));
    return Value::dict({{key_of(rank_), asking(state_.rank_values, place, contents)}});
  }

  TrainingState& state_;
  const LoadOptions& options_;
  int rank_, ranks_;
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
  std::string tensors;
  agree(group, "taking a training state", [&] {
    if (group.size() > 1) tensors = described_tensors(state.values);
    auto leaves = leaves_of_optimizer(state);
    std::optional<Value> optim;
    if (leaves) optim = with_other_options(leaves->tree(), state.other_options);
    std::optional<Value> own;
    if (has_values(state.rank_values))
      own = Value::dict({{key_of(group.rank()), state.rank_values}});
    tree = tree_of(state, model_state_to_save(state.model()), std::move(optim), std::move(own));
  });
  if (group.size() > 1) require_same_tensors(tensors, group);
  return save(tree, where, options, group);
}

SaveResult save(const TrainingState& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group) {
  std::optional<TrainingLoad> job;
  agree(group, "preparing to load a training state", [&] { job.emplace(state, options, group); });
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
  job->report(report);
  return report;
}

LoadReport load(TrainingState& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

}  // namespace tessera
