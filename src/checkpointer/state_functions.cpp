// OLMo's functions beside its checkpointers (checkpoint-rows O-11 to O-16).
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "checkpointer/load_tree.h"
#include "checkpointer/save.h"
#include "format/olmo/yaml.h"
#include "optim_state/tree.h"
#include "tessera/checkpointer.h"
#include "tessera/copy.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "tessera/training_state.h"

namespace tessera {
namespace {

using detail::inside;
using detail::LoadTree;

Location model_and_optim_in(const Location& checkpoint) {
  return directory_in(checkpoint, std::string(olmo::kDcpFolder));
}

Location cached_part(const Location& checkpoint, const std::optional<Location>& cache) {
  const auto part = model_and_optim_in(checkpoint);
  return cache ? Location(cached_store(part, model_and_optim_in(*cache))) : part;
}

bool ends_in_pt(const std::string& name) {
  return name.ends_with(".pt");
}

std::string as_safetensors(std::string name) {
  return name.replace(name.size() - 2, 2, "safetensors");
}

// The tree of a file; none: there is no such file.
std::optional<Value> find_tree(const Location& dir, const std::string& name) {
  try {
    const auto opened = Checkpoint::open(inside(dir, name));
    auto tree = opened.load();
    return opened.kind == CheckpointKind::safetensors ? detail::nested(tree) : std::move(tree);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return std::nullopt;
    throw;
  }
}

void fill(GroupCheckpoint& opened, LoadTree& tree, Group& group) {
  try {
    agree(group, "preparing to load a model and its optimizer",
          [&] { tree.prepare(opened.contents()); });
    opened.load(tree.tree());
  } catch (...) {
    tree.undo();
    throw;
  }
  (void)tree.finish();
}

}  // namespace

SaveResult save_fsdp_model_and_optim_state(const Location& checkpoint, ModuleRef model,
                                           OptimizerRef optim, Group& group,
                                           const StateSaveOptions& options) {
  SaveOptions how;
  how.kind = CheckpointKind::dcp;
  how.overwrite = options.save_overwrite;
  const auto target = model_and_optim_in(checkpoint);
  const auto result = save(TrainingState(model, std::move(optim)), target, how, group);
  if (options.upload_to) {
    upload(target, model_and_optim_in(*options.upload_to), {.overwrite = options.save_overwrite},
           group);
  }
  return result;
}

void load_fsdp_model_and_optim_state(const Location& checkpoint, ModuleRef model,
                                     OptimizerRef optim, Group& group,
                                     const StateLoadOptions& options) {
  auto opened =
      GroupCheckpoint::open(cached_part(checkpoint, options.local_cache), LoadOptions{}, group);
  std::optional<LoadTree> tree;
  LiveNames live;
  agree(group, "preparing to load a model and its optimizer", [&] {
    tree.emplace(model, options.load_optimizer_state ? std::optional(optim) : std::nullopt);
    live = tree->names();
  });
  opened.arrange([&](const Checkpoint& stored) { return as_training_state(stored, live); });
  fill(opened, *tree, group);
}

void load_fsdp_optim_state(ModuleRef model, OptimizerRef optim, const Value& optim_state) {
  LoadTree tree(model, optim);
  const auto stored =
      as_training_state(detail::checkpoint_of(Value::dict({{"optim", optim_state}})), tree.names());
  try {
    tree.prepare_optimizer(stored);
    load(tree.tree(), stored, LoadOptions{}, *solo_group());
  } catch (...) {
    tree.undo();
    throw;
  }
  (void)tree.finish();
}

void save_state_file(const Location& dir, const std::string& name, const Value& state,
                     const StateSaveOptions& options) {
  SaveOptions how;
  how.kind = CheckpointKind::torch_file;
  how.overwrite = options.save_overwrite;
  save(state, inside(dir, name), how);
  if (options.upload_to) save(state, inside(*options.upload_to, name), how);
}

Value load_state_file(const Location& dir, const std::string& name,
                      const StateLoadOptions& options) {
  const auto where = detail::seen_through(dir, options.local_cache);
  if (ends_in_pt(name)) {
    if (auto tree = find_tree(where, as_safetensors(name))) return std::move(*tree);
  }
  if (auto tree = find_tree(where, name)) return std::move(*tree);
  throw Error(ErrorCode::not_found, "there is no such file").at_path(to_string(inside(dir, name)));
}

void load_model_state(const Location& checkpoint, ModuleRef model) {
  const auto alone = solo_group();
  auto opened = GroupCheckpoint::open(model_and_optim_in(checkpoint), LoadOptions{}, *alone);
  LoadTree tree(model, std::nullopt);
  opened.arrange([&](const Checkpoint& stored) { return as_training_state(stored, tree.names()); });
  fill(opened, tree, *alone);
}

}  // namespace tessera
