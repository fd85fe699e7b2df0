// A checkpoint of a checkpointer becomes that of a live model and its optimizer.
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/log.h"
#include "checkpointer/kinds.h"
#include "checkpointer/load_tree.h"
#include "checkpointer/trainer_file.h"
#include "format/olmo/config.h"
#include "tessera/checkpointer.h"
#include "tessera/error.h"
#include "tessera/group_checkpoint.h"

namespace tessera {
namespace {

using detail::LoadTree;

constexpr const char* kConfig = "config.yaml";

void require_files_of(CheckpointerKind kind, const Checkpoint& contents) {
  if (contents.kind == detail::names_of(kind).files) return;
  throw Error(ErrorCode::invalid_argument,
              "the checkpoint is " + std::string(to_string(contents.kind)) +
                  ", which the checkpointer " + std::string(to_string(kind)) + " does not restore")
      .at_path(contents.path);
}

// A config that cannot be read says nothing: a checkpoint does not depend on it.
std::optional<std::string> named_in_config(const Checkpoint& contents) {
  if (!contents.store || !contents.store->exists(kConfig)) return std::nullopt;
  const auto text = read_all(*contents.store->open(kConfig), olmo::kYamlLimit);
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
    throw error.at_path(contents.path + "/" + kConfig);
  }
}

}  // namespace

Value Checkpointer::restore_checkpoint(const Location& path, ModuleRef model, OptimizerRef optim,
                                       const RestoreOptions& options) {
  auto how = load_options();
  auto checkpoint = GroupCheckpoint::open(path, how, group_);
  const Checkpoint& contents = checkpoint.contents();
  detail::TrainerState trainer;
  std::optional<LoadTree> tree;
  try {
    agree(group_, "preparing to restore a checkpoint", [&] {
      require_files_of(kind_, contents);
      if (group_.rank() == 0) require_config_of(kind_, contents);
      if (options.load_trainer_state) {
        trainer = detail::trainer_state_in(path, kind_, contents.world_size, group_.rank(),
                                           group_.size());
      }
      tree.emplace(contents, model,
                   options.load_optimizer_state ? std::optional(optim) : std::nullopt);
    });
    how.rename = tree->rename();
    checkpoint.load(tree->tree(), how);
  } catch (...) {
    if (tree) tree->undo();
    throw;
  }
  auto others = tree->finish();
  if (options.load_optimizer_state) restored_groups_ = std::move(others);
  if (group_.rank() == 0 && !trainer.warning.empty()) log(LogLevel::warning, trainer.warning);
  return trainer.state;
}

}  // namespace tessera
