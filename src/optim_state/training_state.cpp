#include "tessera/training_state.h"

#include <algorithm>
#include <utility>

#include "fsdp/state/model_state.h"
#include "optim_state/optim_leaves.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/group_checkpoint.h"

namespace tessera {
namespace {

using detail::OptimLeaves;

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";

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

Value tree_of(const TrainingState& state, std::optional<OptimLeaves>& optim) {
  auto tree = Value::dict({{kModel, model_state(state.model())}});
  if (optim) tree.set_item(kOptim, optim->tree());
  for (const auto& [key, value] : state.values.pairs()) {
    require_free(key);
    tree.set_item(key, value);
  }
  return state.key.empty() ? tree : Value::dict({{state.key, std::move(tree)}});
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

}  // namespace

SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options,
                Group& group) {
  Value tree;
  agree(group, "taking a training state", [&] {
    auto optim = leaves_of_optimizer(state);
    tree = tree_of(state, optim);
  });
  return save(tree, where, options, group);
}

SaveResult save(const TrainingState& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group) {
  agree(group, "preparing to load a training state", [&] { require_own_names(state, options); });
  auto checkpoint = GroupCheckpoint::open(where, options, group);
  std::optional<OptimLeaves> optim;
  Value tree;
  LoadReport report;
  try {
    agree(group, "preparing to load a training state", [&] {
      optim = leaves_of_optimizer(state);
      if (optim) optim->prepare(detail::stored_part(checkpoint.contents(), place_of_optim(state)));
      tree = tree_of(state, optim);
    });
    report = checkpoint.load(tree, options);
  } catch (...) {
    if (optim) optim->undo();
    throw;
  }
  const Value loaded = state.key.empty() ? tree : tree.at(state.key);
  if (optim) optim->finish(loaded.at(kOptim));
  state.values = loaded_values(state.values, loaded);
  return report;
}

LoadReport load(TrainingState& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

}  // namespace tessera
