#include "optim_state/training_load.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "base/log.h"
#include "checkpoint/open/tree.h"
#include "fsdp/state/model_state.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "value/children.h"

namespace tessera::detail {
namespace {

// What an optimizer gets ready for is found by the checkpoint's own names.
void require_own_names(const TrainingState& state, const LoadOptions& options) {
  if (!options.rename || !state.optimizer()) return;
  throw Error(ErrorCode::unsupported, "other names for the keys of a state with an optimizer");
}

bool has_values(const Value& dict) {
  return !dict.pairs().empty();
}

// The values that a load has put in the place of `values`.
Value loaded_values(const Value& values, const Value& loaded) {
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : values.pairs()) pairs.emplace_back(key, *loaded.find_key(key));
  return Value::dict(std::move(pairs));
}

// A warning that the ranks are others than those that saved.
void warn_of_ranks(int saved, int ranks) {
  log_of_all(LogLevel::warning, "values of " + std::to_string(saved) + " ranks are loaded by " +
                                    std::to_string(ranks) +
                                    (saved < ranks ? ": those behind keep what they have"
                                                   : ": those of the others are left"));
}

// Empty dicts of `value`, which lies at `place`, become what takes all that the checkpoint has
// there.
Value asking(const Value& value, const Path& place, const Checkpoint& contents);

Value asking_dict(const Value& dict, const Path& place, const Checkpoint& contents) {
  if (!has_values(dict)) return leaves_below(contents, place).empty() ? dict : Value();
  auto asked = Value::dict({}, dict.dict_kind());
  for (const auto& [key, child] : dict.pairs())
    asked.set_item(key, asking(child, below(place, step_of_key(key)), contents));
  return asked;
}

// Whether a load takes it as one, as a list without tensors and dicts.
bool is_one_leaf(const Value& list) {
  const auto leaves = leaves_of(list);
  return leaves.size() == 1 && leaves.front().path.empty();
}

Value asking_list(const Value& list, const Path& place, const Checkpoint& contents) {
  if (is_one_leaf(list)) return list;
  Value::List items;
  for (const auto& item : list.items())
    items.push_back(asking(item, below(place, std::ssize(items)), contents));
  auto asked = Value::list(std::move(items));
  return is_one_leaf(asked) ? Value() : asked;
}

Value asking(const Value& value, const Path& place, const Checkpoint& contents) {
  if (value.is(Value::Kind::dict)) return asking_dict(value, place, contents);
  return value.is(Value::Kind::list) ? asking_list(value, place, contents) : value;
}

}  // namespace

TrainingLoad::TrainingLoad(const Placed<TrainingState>& placed, const LoadOptions& options,
                           int rank, int ranks)
    : state_(placed.state), place_(placed.place), options_(options), rank_(rank), ranks_(ranks) {
  named_from_top(place_, [&] {
    require_own_names(state_, options);
    if (state_.optimizer()) optim_.emplace(state_.model(), *state_.optimizer());
    model_ = model_state(state_.model());
  });
}

LiveNames TrainingLoad::names() {
  return live_names(model_, optim_);
}

void TrainingLoad::take_trainer_state(const TrainerState& found) {
  if (!found.state)
    throw Error(ErrorCode::not_found, "the checkpoint has no trainer's state").at_key(kTrain);
  trainer_ = found.state;
}

Value TrainingLoad::prepare(const Checkpoint& contents) {
  std::optional<Value> optim;
  if (optim_) {
    const auto stored = stored_part(contents, below(place_, kOptim));
    optim_->prepare(stored, options_.missing);
    optim = optim_->tree_like(stored);
  }
  auto tree = tree_of(state_, model_, std::move(optim), stored_of_rank(contents));
  for (const auto& [key, value] : state_.values.pairs()) {
    // Under other names a none takes nothing.
    if (!options_.rename)
      tree.set_item(key, asking(value, below(place_, step_of_key(key)), contents));
  }
  if (trainer_) tree.erase(kTrain);
  return tree;
}

// The values that this rank loads of its own; nothing where the checkpoint has no such rank.
std::optional<Value> TrainingLoad::stored_of_rank(const Checkpoint& contents) const {
  if (!has_values(state_.rank_values)) return std::nullopt;
  const auto place = below(place_, kRankValues);
  const auto saved = static_cast<int>(stored_part(contents, place).pairs().size());
  if (saved != ranks_) warn_of_ranks(saved, ranks_);
  if (saved > 0 && rank_ >= saved) return std::nullopt;
  const auto key = key_of(rank_);
  return Value::dict({{key, asking(state_.rank_values, below(place, key), contents)}});
}

void TrainingLoad::finish(Value loaded) {
  if (optim_) state_.other_options = optim_->finish(loaded.at(kOptim));
  if (trainer_) loaded.set_item(kTrain, *trainer_);
  state_.values = loaded_values(state_.values, loaded);
  if (const auto* ranks = loaded.find(kRankValues))
    state_.rank_values = loaded_values(state_.rank_values, ranks->at(key_of(rank_)));
}

void TrainingLoad::undo() {
  if (optim_) optim_->undo();
}

void TrainingLoad::report(LoadReport& report) const {
  if (!optim_) return;
  for (const auto& name : optim_->missing())
    report.missing.push_back(dotted(below(below(below(place_, kOptim), "state"), name)));
}

std::vector<TrainingLoad> loads_of(TrainingState& state, const LoadOptions& options, int rank,
                                   int ranks) {
  std::vector<TrainingLoad> loads;
  for (const auto& one : placed(state)) loads.emplace_back(one, options, rank, ranks);
  return loads;
}

LoadReport load_all(std::vector<TrainingLoad>& loads, const Checkpoint& contents, Group& group,
                    const std::function<LoadReport(Value& tree)>& load) {
  LoadReport report;
  auto tree = Value::dict();
  try {
    agree(group, "preparing to load a training state", [&] {
      for (auto& one : loads) {
        put(tree, one.place(), named_from_top(one.place(), [&] { return one.prepare(contents); }));
      }
    });
    report = load(tree);
  } catch (...) {
    for (auto& one : loads) one.undo();
    throw;
  }
  for (auto& one : loads) {
    named_from_top(one.place(), [&] { one.finish(at(tree, one.place())); });
    one.report(report);
  }
  std::ranges::sort(report.missing);
  return report;
}

}  // namespace tessera::detail
