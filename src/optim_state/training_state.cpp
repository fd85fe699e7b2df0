#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "checkpoint/open/kinds.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "fsdp/state/model_state.h"
#include "fsdp/unit/registry.h"
#include "optim_state/steady.h"
#include "optim_state/training_load.h"
#include "optim_state/training_tree.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "tessera/snapshot.h"
#include "tessera/training_state.h"
#include "tessera/training_writer.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::kTrain;
using detail::TrainingLoad;

// A line for each tensor that this rank has whole: of such the first rank's is saved.
std::string described_tensors(const TrainingState& state) {
  std::string text;
  for (const auto& [one, place] : detail::placed(state)) {
    const auto above = dotted(place);
    text += above + " is there\n";
    for (const auto& leaf : leaves_of(one.values)) {
      if (!leaf.value.is(Value::Kind::tensor) || !is_whole_in_memory(leaf.value.as_tensor()))
        continue;
      const auto host = to_host(tensor_of(leaf.value.as_tensor()));
      const auto digest = digest64(host_bytes(host));
      text += above + (above.empty() ? "" : ".") + leaf.name + " " + std::to_string(digest) + "\n";
    }
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
                    "all (what each rank has for itself belongs into rank_values), or others")
        .at_key(first_difference(to_text(all[0]), to_text(all[rank])));
  }
}

// OLMo's kinds have one model, and it lies under no key.
void require_place_for_keys(const TrainingState& state, const SaveOptions& options) {
  if (!options.kind || !is_olmo_kind(*options.kind)) return;
  const auto refuse = [&](const std::string& what, const std::string& key) {
    throw Error(ErrorCode::unsupported, "TrainingState::" + what + " in a checkpoint of kind " +
                                            std::string(to_string(*options.kind)))
        .at_key(key);
  };
  if (!state.key.empty()) refuse("key", state.key);
  if (!state.others.empty()) refuse("others", state.others.front().key);
}

// Ranks that have saved just these parts themselves open their own files alone. Names that the
// caller gives, and states below keys, are taken as they are.
GroupCheckpoint opened(const TrainingLoad& root, bool is_plain, const Location& where,
                       const LoadOptions& options, Group& group) {
  if (!is_plain) return GroupCheckpoint::open(where, options, group);
  return GroupCheckpoint::open(where, root.model(), options, group);
}

// The most ranks that one of its units is sharded over; none: it is not.
std::optional<Mesh> mesh_of(const TrainingState& state) {
  std::optional<Mesh> largest;
  for (const auto& [one, place] : detail::placed(state)) {
    for (const auto& [name, unit] : detail::units_below(one.model().get())) {
      const auto mesh = unit->all_ranks();
      if (!largest || largest->size() < mesh.size()) largest = mesh;
    }
  }
  return largest;
}

// Calls `fn` with those ranks, or with this process alone.
template <typename Fn>
auto with_group_of(const TrainingState& state, Fn fn) {
  if (const auto mesh = mesh_of(state)) return fn(mesh->checkpoint_group());
  const auto alone = solo_group();
  return fn(*alone);
}

// Collective. `steady`: where what a writer may copy later goes.
Value agreed_tree(const TrainingState& state, const SaveOptions& options, Group& group,
                  SteadyMemory* steady = nullptr) {
  Value tree;
  std::string tensors;
  agree(group, "taking a training state", [&] {
    require_place_for_keys(state, options);
    if (group.size() > 1) tensors = described_tensors(state);
    tree = detail::tree_to_save(state, group.rank());
    if (steady != nullptr) *steady = detail::steady_memory(state);
  });
  if (group.size() > 1) {
    require_same_tensors(tensors, group);
    for (const auto& [one, place] : detail::placed(state)) {
      auto& model = detail::at(tree, detail::below(place, detail::kModel));
      model = detail::with_rank0_buffers(model, one.model(), options.copies, group);
    }
  }
  return tree;
}

}  // namespace

SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options,
                Group& group) {
  return save(agreed_tree(state, options, group), where, options, group);
}

PendingSave save(CheckpointWriter& writer, const TrainingState& state, const Location& where,
                 const SaveOptions& options, Group& group, SaveDone done) {
  // Else a rank could fail here, and the others begin a save that it does not begin.
  if (group.size() != writer.ranks()) {
    throw Error(ErrorCode::invalid_argument,
                "the writer is of " + std::to_string(writer.ranks()) + " ranks, and " +
                    std::to_string(group.size()) +
                    " agree on the state: give the group of the writer's ranks")
        .at_path(to_string(where));
  }
  SteadyMemory steady;
  const auto tree = agreed_tree(state, options, group, &steady);
  return writer.save(tree, where, options, std::move(done), std::move(steady));
}

PendingSave save(CheckpointWriter& writer, const TrainingState& state, const Location& where,
                 const SaveOptions& options, SaveDone done) {
  return with_group_of(state, [&](Group& group) {
    return save(writer, state, where, options, group, std::move(done));
  });
}

SaveResult save(const TrainingState& state, const Location& where, const SaveOptions& options) {
  return with_group_of(state, [&](Group& group) { return save(state, where, options, group); });
}

SaveResult save(const TrainingState& state, const Location& where, Group& group) {
  return save(state, where, {}, group);
}

LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options,
                Group& group) {
  std::vector<TrainingLoad> loads;
  agree(group, "preparing to load a training state",
        [&] { loads = detail::loads_of(state, options, group.rank(), group.size()); });
  auto& root = loads.front();
  const bool is_plain = root.place().empty() && loads.size() == 1 && !options.rename;
  auto checkpoint = opened(root, is_plain, where, options, group);
  if (is_plain && is_olmo_kind(checkpoint.contents().kind)) {
    const auto live = root.names();
    checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
    if (state.values.find(kTrain) != nullptr)
      root.take_trainer_state(trainer_state(where, options, group));
  } else if (is_plain) {
    detail::arrange_model_alone(checkpoint, root.model());
  }
  return detail::load_all(loads, checkpoint.contents(), group,
                          [&](Value& tree) { return checkpoint.load(tree, options); });
}

LoadReport load(TrainingState& state, const Location& where, const LoadOptions& options) {
  return with_group_of(state, [&](Group& group) { return load(state, where, options, group); });
}

LoadReport load(TrainingState& state, const Location& where, Group& group) {
  return load(state, where, {}, group);
}

LoadReport load(TrainingState& state, const StateFiles& files, const LoadOptions& options) {
  return with_group_of(state, [&](Group& group) { return load(state, files, options, group); });
}

SaveResult save(ModuleRef model, OptimizerRef optimizer, const Location& where,
                const SaveOptions& options) {
  return save(TrainingState(model, std::move(optimizer)), where, options);
}

LoadReport load(ModuleRef model, OptimizerRef optimizer, const Location& where,
                const LoadOptions& options) {
  TrainingState state(model, std::move(optimizer));
  return load(state, where, options);
}

Snapshot::Snapshot(const TrainingState& state)
    : tree_(detail::host_copy(detail::tree_to_save(state, 0))) {}

void Snapshot::restore(TrainingState& state) const {
  const auto alone = solo_group();
  const LoadOptions options;
  auto loads = detail::loads_of(state, options, alone->rank(), alone->size());
  const auto contents = detail::checkpoint_of(tree_);
  detail::load_all(loads, contents, *alone,
                   [&](Value& tree) { return load(tree, contents, options, *alone); });
}

}  // namespace tessera
