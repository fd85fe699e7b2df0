#include "checkpointer/restore.h"

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "base/log.h"
#include "checkpointer/load_tree.h"
#include "checkpointer/save.h"
#include "format/olmo/yaml.h"
#include "tessera/checkpointer.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "tessera/restore.h"
#include "tessera/stateful.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

// The tensors of the tree that the checkpoint has with the same type; the same on every rank. Not
// numbers of steps: a rank that holds nothing of a parameter does not count them.
Value comparable(const Value& tree, const GroupCheckpoint& checkpoint) {
  auto found = Value::dict();
  const Checkpoint& contents = checkpoint.contents();
  for (const auto& leaf : flatten(tree)) {
    // A rank's own files lack the optimizer's state of what it holds nothing of.
    if (checkpoint.is_own() && !leaf.name.starts_with("model.")) continue;
    if (!leaf.value.is(Value::Kind::tensor) || leaf.value.as_tensor().shape.empty()) continue;
    const auto* stored = contents.find(leaf.name);
    if (stored == nullptr || !stored->value.is(Value::Kind::tensor)) continue;
    if (stored->value.as_tensor().dtype == leaf.value.as_tensor().dtype)
      found.set_item(leaf.name, leaf.value);
  }
  return found;
}

void require_equal(const StateDigests& loaded, const StateDigests& saved) {
  std::vector<std::string> differ;
  for (const auto& [name, digest] : loaded) {
    const auto known = saved.find(name);
    if (known != saved.end() && known->second != digest) differ.push_back(name);
  }
  if (differ.empty()) return;
  throw Error(ErrorCode::mismatch, std::to_string(differ.size()) +
                                       " tensors are not what was saved, by their digests; the "
                                       "first is this")
      .at_key(differ.front());
}

}  // namespace

void require_as_saved(const Value& tree, const GroupCheckpoint& checkpoint, int threads,
                      const LoadedSums& loaded_sums, Group& group) {
  constexpr const char* kOperation = "comparing what was restored with what was saved";
  StateDigests saved;
  Bytes has_digests(1);
  agree(group, kOperation, [&] {
    if (group.rank() > 0) return;
    const auto& store = checkpoint.contents().store;
    if (store) saved = saved_digests(*store);
    has_digests[0] = std::byte{static_cast<unsigned char>(saved.empty() ? 0 : 1)};
  });
  if (group.spread(has_digests)[0] == std::byte{0}) return;
  const auto loaded = state_digests(comparable(tree, checkpoint), group, threads, &loaded_sums);
  agree(group, kOperation, [&] {
    if (group.rank() == 0) require_equal(loaded, saved);
  });
}

}  // namespace tessera::detail

namespace tessera {

// A checkpoint of a checkpointer becomes that of a live model and its optimizer.

namespace {

using detail::LoadTree;

void require_files_of(CheckpointerKind kind, const Checkpoint& contents) {
  if (contents.kind == detail::names_of(kind).files) return;
  throw Error(ErrorCode::invalid_argument,
              "the checkpoint is " + std::string(to_string(contents.kind)) +
                  ", which the checkpointer " + std::string(to_string(kind)) + " does not restore")
      .at_path(contents.path);
}

// A config that cannot be read says nothing: a checkpoint does not depend on it.
std::optional<std::string> named_in_config(const Checkpoint& contents) {
  if (!contents.store || !contents.store->exists(olmo::kConfigFile)) return std::nullopt;
  const auto text = read_all(*contents.store->open(olmo::kConfigFile), olmo::kYamlLimit);
  try {
    return olmo::sharded_checkpointer_of(text);
  } catch (const Error&) {
    return std::nullopt;
  }
}

void require_config_of(CheckpointerKind kind, const Checkpoint& contents) {
  try {
    detail::require_named(kind, named_in_config(contents));
  } catch (Error& error) {
    throw error.at_path(contents.path + "/" + std::string(olmo::kConfigFile));
  }
}

constexpr const char* kRandom = "rng";
constexpr std::array kGenerators{"torch", "cuda"};  // whose states are derived

Bytes bytes_of(const Value* state) {
  if (state == nullptr || !state->is(Value::Kind::tensor)) return {};
  const auto bytes = plain(tensor_of(state->as_tensor())).contiguous();
  const auto* data = static_cast<const std::byte*>(bytes.const_data_ptr());
  return {data, data + bytes.nbytes()};
}

Value state_of(const Bytes& bytes) {
  auto tensor = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return leaf_of(tensor);
}

// `full` has rank 0's random numbers alone: the other ranks get some that are derived from them
// (checkpoint-rows OQ-15).
void derive_random_state(Value& state, Group& group) {
  const Value* own = state.find(kRandom);
  auto common = Value::dict();
  for (const auto* generator : kGenerators) {
    const auto known = group.spread(bytes_of(own == nullptr ? nullptr : own->find(generator)));
    if (!known.empty()) common.set_item(generator, state_of(known));
  }
  if (group.rank() == 0 || common.size() == 0) return;
  state.set_item(kRandom, derived_random_state(common, group.rank()));
}

// None where no rank has saved one.
Value trainer_state_for(const Location& where, CheckpointerKind kind, const LoadOptions& options,
                        Group& group) {
  auto found = trainer_state(where, options, group).state;
  if (!found) return {};
  if (kind == CheckpointerKind::full && group.size() > 1) {
    derive_random_state(*found, group);
    if (group.rank() == 0) {
      log(LogLevel::warning,
          "a `full` checkpoint has the random state of rank 0 alone: other ranks get seeds that "
          "are derived from it");
    }
  }
  return std::move(*found);
}

// After the load: what is not what was saved must not be trained with.
void require_proven(LoadTree& tree, const GroupCheckpoint& checkpoint, const LoadedSums& sums,
                    int threads, Group& group) {
  try {
    detail::require_as_saved(tree.tree(), checkpoint, threads, sums, group);
  } catch (const Error& failure) {
    throw spoiled(tree.tree(), failure);
  }
}

}  // namespace

Value Checkpointer::restore_checkpoint(const Location& path, ModuleRef model, OptimizerRef optim,
                                       const RestoreOptions& options) {
  const auto where = detail::seen_through(path, options.local_cache);
  std::optional<LoadTree> tree;
  LiveNames live;
  agree(group_, "preparing to restore a checkpoint", [&] {
    tree.emplace(model, options.load_optimizer_state ? std::optional(optim) : std::nullopt);
    live = tree->names();
  });
  // Ranks that have saved just these parts themselves open their own files alone.
  auto checkpoint = GroupCheckpoint::open(where, tree->model(), load_options(), group_);
  Value::List orders;
  agree(group_, "preparing to restore a checkpoint", [&] {
    const Checkpoint& stored = checkpoint.contents();
    require_files_of(kind_, stored);
    if (group_.rank() == 0) require_config_of(kind_, stored);
    orders = detail::stored_orders(stored);
  });
  Value trainer;
  if (options.load_trainer_state) trainer = trainer_state_for(where, kind_, load_options(), group_);
  checkpoint.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
  try {
    agree(group_, "preparing to restore a checkpoint",
          [&] { tree->prepare(checkpoint.contents()); });
    LoadedSums sums;
    LoadOptions loading = load_options();
    loading.filled = sums.hook();
    checkpoint.load(tree->tree(), loading);
    require_proven(*tree, checkpoint, sums, loading.threads, group_);
  } catch (...) {
    tree->undo();
    throw;
  }
  auto others = tree->finish();
  if (options.load_optimizer_state) {
    restored_groups_ = std::move(others);
    restored_orders_ = std::move(orders);
  }
  return trainer;
}

}  // namespace tessera
