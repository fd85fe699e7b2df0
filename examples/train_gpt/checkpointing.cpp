#include "checkpointing.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <set>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/group_checkpoint.h"
#include "tessera/training_state.h"
#include "tessera/verify.h"

namespace {

namespace fs = std::filesystem;
using tessera::Checkpoint;
using tessera::Error;
using tessera::ErrorCode;
using tessera::Value;

// step{N}
struct StepDirectory {
  std::int64_t step = 0;
  std::string path;
};

// Newest first.
std::vector<StepDirectory> step_directories(const std::string& save) {
  std::vector<StepDirectory> found;
  std::error_code failure;
  for (const auto& entry : fs::directory_iterator(save, failure)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("step") || !entry.is_directory()) continue;
    StepDirectory directory{.step = 0, .path = entry.path().string()};
    const char* end = name.data() + name.size();
    const auto parsed = std::from_chars(name.data() + 4, end, directory.step);
    if (parsed.ec == std::errc() && parsed.ptr == end) found.push_back(std::move(directory));
  }
  if (failure && failure != std::errc::no_such_file_or_directory) {
    throw Error(ErrorCode::io, "the directory of checkpoints cannot be read: " + failure.message())
        .at_path(save);
  }
  std::ranges::sort(found, std::ranges::greater(), &StepDirectory::step);
  return found;
}

bool is_complete(const StepDirectory& directory) {
  return tessera::verify(directory.path, {.read_data = false}).findings.empty();
}

// What a save leaves that never got as far as its marker was no checkpoint yet.
bool is_marked(const StepDirectory& directory) {
  return fs::exists(fs::path(directory.path) / ".metadata");
}

// Empty: there is none yet.
std::string latest(const std::string& save) {
  const auto directories = step_directories(save);
  for (const StepDirectory& directory : directories) {
    if (is_complete(directory)) return directory.path;
  }
  if (std::ranges::none_of(directories, is_marked)) return {};
  throw Error(ErrorCode::corrupt, "every checkpoint step{N} to resume from is damaged")
      .at_path(save);
}

// Shape alone does not tell how many heads a model has, so the trainer's part says it all.
Value model_config(const Options& o) {
  Value config = Value::dict();
  config.set_item("dim", o.dim);
  config.set_item("layers", o.layers);
  config.set_item("heads", o.heads);
  config.set_item("seq", o.seq);
  config.set_item("tied", o.tied);
  return config;
}

Value trainer_state(const Progress& progress, const Options& o) {
  Value trainer = Value::dict();
  trainer.set_item("step", progress.step);
  trainer.set_item("tokens", progress.tokens);
  trainer.set_item("seed", static_cast<std::int64_t>(o.seed));
  trainer.set_item("batch", o.batch);
  trainer.set_item("model", model_config(o));
  return trainer;
}

const Value& required(const Checkpoint& checkpoint, const std::string& name) {
  const tessera::Leaf* leaf = checkpoint.find(name);
  if (leaf == nullptr) {
    throw Error(ErrorCode::not_found, "the checkpoint has no such value").at_key(name);
  }
  return leaf->value;
}

std::set<std::string> model_names(const Checkpoint& checkpoint) {
  std::set<std::string> names;
  for (const tessera::Leaf& leaf : checkpoint.leaves) {
    if (leaf.name.starts_with("model.")) names.insert(leaf.name);
  }
  return names;
}

std::set<std::string> model_names(const Gpt& model) {
  std::set<std::string> names;
  for (const auto& parameter : model->named_parameters()) names.insert("model." + parameter.key());
  for (const auto& buffer : model->named_buffers()) names.insert("model." + buffer.key());
  return names;
}

// Loading asks only for what this model has; a checkpoint that has more is of another model.
void require_same_model(const Checkpoint& checkpoint, const Gpt& model, const Options& options) {
  const auto theirs = model_names(checkpoint);
  const auto ours = model_names(model);
  std::vector<std::string> different;
  std::ranges::set_symmetric_difference(theirs, ours, std::back_inserter(different));
  if (!different.empty()) {
    const std::string& first = different.front();
    throw Error(ErrorCode::mismatch, std::string("the checkpoint is of another model: only ") +
                                         (theirs.contains(first) ? "the checkpoint" : "this run") +
                                         " has this tensor (" + std::to_string(different.size()) +
                                         " names differ)")
        .at_key(first);
  }
  if (checkpoint.find("trainer.step") == nullptr) return;
  const Value config = model_config(options);
  for (const auto& [key, ours_value] : config.pairs()) {
    const std::string name = "trainer.model." + key.as_string();
    const Value& saved = required(checkpoint, name);
    if (!(saved == ours_value)) {
      throw Error(ErrorCode::mismatch, "the checkpoint is of another model: its --" +
                                           key.as_string() + " is not the one given")
          .at_key(name);
    }
  }
}

// As a checkpoint's optimizer was grouped; it may be by another rule than ours.
Training::Groups saved_groups(const Checkpoint& checkpoint) {
  Training::Groups groups;
  while (const auto* leaf =
             checkpoint.find("optim.param_groups." + std::to_string(groups.size()) + ".params")) {
    groups.emplace_back();
    for (const Value& name : leaf->value.items()) groups.back().push_back(name.as_string());
  }
  return groups;
}

void remove_checkpoint(const StepDirectory& directory) {
  // The marker goes first, so that what a kill leaves of the removal is not taken for a checkpoint.
  fs::remove(fs::path(directory.path) / ".metadata");
  fs::remove_all(directory.path);
}

// Of the checkpoints up to `newest` the last `keep` complete ones stay. Incomplete ones before
// `newest` are what killed saves left.
void remove_old(const std::string& save, std::int64_t newest, std::int64_t keep) {
  std::int64_t kept = 0;
  for (const StepDirectory& directory : step_directories(save)) {
    if (directory.step > newest) continue;
    if (kept < keep && is_complete(directory)) {
      ++kept;
    } else {
      remove_checkpoint(directory);
    }
  }
}

// Rank 0 looks, every rank gets the answer.
std::string find_checkpoint(const Options& options, tessera::Group& group) {
  std::string path = options.resume;
  if (path != "latest") return path;
  tessera::agree(group, "looking for the latest checkpoint", [&] {
    if (group.rank() == 0) path = latest(options.save);
  });
  const auto* bytes = reinterpret_cast<const std::byte*>(path.data());
  const auto answer = group.broadcast(tessera::Bytes(bytes, bytes + path.size()));
  return {reinterpret_cast<const char*>(answer.data()), answer.size()};
}

}  // namespace

std::string checkpoint_path(const Options& options, std::int64_t step) {
  return (fs::path(options.save) / ("step" + std::to_string(step))).string();
}

Progress resume_training(Training& training, const Options& options, tessera::Group& group) {
  Progress progress{.checkpoint = find_checkpoint(options, group)};
  if (progress.checkpoint.empty()) return progress;
  bool has_trainer = false;
  const auto opened = tessera::GroupCheckpoint::open(progress.checkpoint, {}, group);
  tessera::agree(group, "opening the checkpoint to resume from", [&] {
    const Checkpoint& checkpoint = opened.contents();
    try {
      require_same_model(checkpoint, training.model(), options);
      training.regroup(saved_groups(checkpoint));
      has_trainer = checkpoint.find("trainer.step") != nullptr;
      if (!has_trainer) return;
      progress.step = required(checkpoint, "trainer.step").as_int();
      progress.tokens = required(checkpoint, "trainer.tokens").as_int();
    } catch (Error& error) {
      throw error.at_path(progress.checkpoint);
    }
  });
  tessera::TrainingState state(training.model(), training.optimizer());
  tessera::load(state, progress.checkpoint, group);
  if (!has_trainer) {
    progress.step = training.optimizer().state(0, 0).step.item<std::int64_t>();
    progress.tokens = progress.step * options.batch * options.seq;
  }
  return progress;
}

std::string save_training(Training& training, const Progress& progress, const Options& options,
                          tessera::Group& group) {
  tessera::TrainingState state(training.model(), training.optimizer());
  state.values.set_item("trainer", trainer_state(progress, options));
  const std::string path = checkpoint_path(options, progress.step);
  tessera::SaveOptions how;
  how.overwrite = true;  // a resumed run may come by here again
  tessera::save(state, path, how, group);
  if (options.keep > 0) {
    tessera::agree(group, "removing old checkpoints", [&] {
      if (group.rank() == 0) remove_old(options.save, progress.step, options.keep);
    });
  }
  return path;
}
