#include "optim_state/training_tree.h"

#include <algorithm>
#include <string>
#include <utility>

#include "fsdp/state/model_state.h"
#include "optim_state/optim_leaves.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

constexpr const char* kGroups = "param_groups";

Error taken(const std::string& key) {
  return Error(ErrorCode::invalid_argument, "two parts of a training state have this key")
      .at_key(key);
}

void require_free(const std::string& key) {
  for (const auto* own : {kModel, kOptim, kRankValues}) {
    if (key == own) throw taken(key);
  }
}

template <typename State>
void add_placed(State& state, Path above, std::vector<Placed<State>>& into) {
  if (!state.key.empty()) above.emplace_back(state.key);
  into.push_back({state, above});
  for (auto& other : state.others) {
    if (other.key.empty())
      throw Error(ErrorCode::invalid_argument, "one of TrainingState::others has no key");
    require_free(other.key);
    add_placed(other, above, into);
  }
}

template <typename State>
std::vector<Placed<State>> all_placed(State& state) {
  std::vector<Placed<State>> all;
  add_placed(state, {}, all);
  return all;
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

Value one_to_save(const TrainingState& state, int rank) {
  std::optional<Value> optim, own;
  if (state.optimizer()) {
    OptimLeaves leaves(state.model(), *state.optimizer());
    optim = with_other_options(leaves.tree(), state.other_options);
  }
  if (!state.rank_values.pairs().empty()) own = Value::dict({{key_of(rank), state.rank_values}});
  return tree_of(state, model_state_to_save(state.model()), std::move(optim), std::move(own));
}

}  // namespace

std::vector<Placed<const TrainingState>> placed(const TrainingState& state) {
  return all_placed(state);
}

std::vector<Placed<TrainingState>> placed(TrainingState& state) {
  return all_placed(state);
}

Path below(Path place, PathPart step) {
  place.push_back(std::move(step));
  return place;
}

Error moved_below(const Path& place, const Error& error) {
  const auto above = dotted(place);
  Error moved(error.code(), error.message());
  moved.at_key(error.key().empty() ? above : above + "." + error.key());
  if (!error.path().empty()) moved.at_path(error.path());
  if (error.offset()) moved.at_offset(*error.offset());
  return moved;
}

Value tree_of(const TrainingState& state, const Value& model, std::optional<Value> optim,
              std::optional<Value> ranks) {
  auto tree = Value::dict({{kModel, model}});
  if (optim) tree.set_item(kOptim, std::move(*optim));
  if (ranks) tree.set_item(kRankValues, std::move(*ranks));
  for (const auto& [key, value] : state.values.pairs()) {
    if (key.is(Value::Kind::string)) require_free(key.as_string());
    tree.set_item(key, value);
  }
  return tree;
}

void put(Value& tree, const Path& place, Value part) {
  if (place.empty()) {
    tree = std::move(part);
    return;
  }
  const auto key = step_text(place.back());
  auto& into = at(tree, {place.begin(), place.end() - 1});
  if (into.find(key) != nullptr) throw taken(dotted(place));
  into.set_item(key, std::move(part));
}

Value& at(Value& tree, const Path& place) {
  auto* found = &tree;
  for (const auto& step : place) found = &found->at(std::string_view(step_text(step)));
  return *found;
}

std::string key_of(int rank) {
  return std::to_string(rank);
}

Value tree_to_save(const TrainingState& state, int rank) {
  auto tree = Value::dict();
  for (const auto& all : placed(state)) {
    const auto& one = all.state;
    put(tree, all.place, named_from_top(all.place, [&] { return one_to_save(one, rank); }));
  }
  return tree;
}

}  // namespace tessera::detail
