#include "checkpointing.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/checkpointer.h"
#include "tessera/restore.h"
#include "tessera/run_directory.h"
#include "tessera/stateful.h"
#include "tessera/storage.h"
#include "tessera/training_state.h"
#include "tessera/training_writer.h"

namespace {

using tessera::Checkpoint;
using tessera::CheckpointerKind;
using tessera::Error;
using tessera::ErrorCode;
using tessera::Value;

constexpr const char* kTrainer = "trainer";  // our own part of the trainer's state

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

const Value& required(const Value& values, const std::string& key) {
  const Value* found = values.find(key);
  if (found == nullptr) {
    throw Error(ErrorCode::not_found, "the checkpoint has no such value")
        .at_key(std::string(kTrainer) + "." + key);
  }
  return *found;
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
void require_same_model(const Checkpoint& checkpoint, const Gpt& model) {
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
}

void require_same_config(const Value& trainer, const Options& options) {
  const Value config = model_config(options);
  const Value& saved = required(trainer, "model");
  for (const auto& [key, ours] : config.pairs()) {
    if (saved.find_key(key) != nullptr && *saved.find_key(key) == ours) continue;
    throw Error(ErrorCode::mismatch, "the checkpoint is of another model: its --" +
                                         key.as_string() + " is not the one given")
        .at_key(std::string(kTrainer) + ".model." + key.as_string());
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

// What OLMo's tools read of it is the checkpointer.
std::string config_text(const Options& o) {
  std::string text = "model:\n";
  for (const auto& [key, value] :
       std::array<std::pair<const char*, std::int64_t>, 4>{{{"d_model", o.dim},
                                                            {"n_layers", o.layers},
                                                            {"n_heads", o.heads},
                                                            {"max_sequence_length", o.seq}}})
    text += std::string("  ") + key + ": " + std::to_string(value) + "\n";
  text += "seed: " + std::to_string(o.seed) + "\n";
  if (o.checkpointer != "full") text += "sharded_checkpointer: " + o.checkpointer + "\n";
  return text;
}

// The names of OLMo's trainer, and our own part.
Value olmo_trainer_state(const Progress& progress, const Options& options) {
  return Value::dict({{"global_step", progress.step},
                      {"global_train_tokens_seen", progress.tokens},
                      {kTrainer, trainer_state(progress, options)}});
}

// The warnings are the run's: which newer checkpoints are damaged.
std::string find_checkpoint(const Options& options, tessera::Group& group,
                            std::vector<std::string>& warnings) {
  if (options.resume != "latest") return options.resume;
  tessera::LatestCheckpoint latest = tessera::latest_checkpoint(options.save, {}, group);
  warnings = std::move(latest.warnings);
  return latest.found ? latest.found->where.path : "";
}

// What saved the checkpoint, if it is one of OLMo's checkpointers.
std::optional<CheckpointerKind> olmo_kind_of(const std::string& path, tessera::Group& group) {
  try {
    return tessera::checkpointer_of(path, group);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    return std::nullopt;
  }
}

// Takes the progress from our own part of the trainer's state.
void take_progress(const Value& trainer, Progress& progress, const Options& options) {
  require_same_config(trainer, options);
  progress.step = required(trainer, "step").as_int();
  progress.tokens = required(trainer, "tokens").as_int();
}

// Each returns whether the checkpoint has our part: else a foreign program saved it.
//
// A host may have the files of its own ranks alone for OLMo's kinds, so nothing here opens all.
bool resume_olmo(Training& training, Progress& progress, CheckpointerKind kind,
                 const Options& options, tessera::Group& group) {
  const auto found = tessera::trainer_state(progress.checkpoint, {}, group);
  const Value* trainer = found.state ? found.state->find(kTrainer) : nullptr;
  tessera::agree(group, "opening the checkpoint to resume from", [&] {
    try {
      if (trainer != nullptr) take_progress(*trainer, progress, options);
    } catch (Error& error) {
      throw error.at_path(progress.checkpoint);
    }
  });
  (void)tessera::Checkpointer(kind, group)
      .restore_checkpoint(progress.checkpoint, training.model(), training.optimizer(),
                          {.load_trainer_state = false});
  return trainer != nullptr;
}

bool resume_state(Training& training, Progress& progress, const Options& options,
                  tessera::Group& group) {
  bool is_ours = false;
  const auto opened = tessera::GroupCheckpoint::open(progress.checkpoint, {}, group);
  tessera::agree(group, "opening the checkpoint to resume from", [&] {
    const Checkpoint& checkpoint = opened.contents();
    try {
      require_same_model(checkpoint, training.model());
      training.regroup(saved_groups(checkpoint));
      is_ours = checkpoint.find(std::string(kTrainer) + ".step") != nullptr;
      if (!is_ours) return;
      take_progress(checkpoint.only({kTrainer}).tree().at(kTrainer), progress, options);
    } catch (Error& error) {
      throw error.at_path(progress.checkpoint);
    }
  });
  tessera::TrainingState state(training.model(), training.optimizer());
  tessera::load(state, progress.checkpoint, group);
  return is_ours;
}

}  // namespace

std::string checkpoint_path(const Options& options, std::int64_t step) {
  return tessera::run_checkpoint(options.save, step).where.path;
}

void require_place(const Options& options, tessera::Group& group) {
  tessera::agree(group, "trying the place of the checkpoints", [&] {
    if (group.rank() != 0) return;
    tessera::open_store(options.save)->require_writable("train_gpt-probe", false);
  });
}

Progress resume_training(Training& training, const Options& options, tessera::Group& group) {
  Progress progress;
  progress.checkpoint = find_checkpoint(options, group, progress.warnings);
  if (progress.checkpoint.empty()) return progress;
  const auto kind = olmo_kind_of(progress.checkpoint, group);
  const bool is_ours = kind ? resume_olmo(training, progress, *kind, options, group)
                            : resume_state(training, progress, options, group);
  if (!is_ours) {
    progress.step = training.optimizer().state(0, 0).step.item<std::int64_t>();
    progress.tokens = progress.step * options.batch * options.seq;
  }
  if (!options.save.empty()) tessera::go_on_from(options.save, progress.step, group);
  return progress;
}

Saver::Saver(const Options& options, const tessera::Mesh& mesh, tessera::Grace& grace,
             tessera::RunLease* lease)
    : options_(options), grace_(grace), group_(mesh.checkpoint_group()), lease_(lease) {
  const auto stop = [this] { stop_.request_stop(); };
  when_over_.emplace(grace.stop(), stop);
  if (lease_ != nullptr) when_lost_.emplace(lease_->lost(), stop);
  if (options.saves_by_cost) frequency_.emplace(group_);
  if (options.async.empty()) return;
  tessera::WriterOptions how;
  how.process = options.async == "process";
  if (options.async == "overlap") how.overlap = tessera::Overlap::always;
  how.keep = std::chrono::seconds(options.keep_in_memory);
  how.partner = options.partner ? 1 : 0;
  writer_.emplace(mesh.writer_group(), how);
}

template <typename Work>
void Saver::hold_run(const Work& work) {
  lease_->require_held();
  try {
    work();
  } catch (const Error& error) {
    if (error.code() == tessera::ErrorCode::cancelled) lease_->require_held();
    throw;
  }
}

bool Saver::is_due(std::int64_t step) {
  if (frequency_) return frequency_->due();
  return options_.save_every > 0 && step % options_.save_every == 0;
}

std::vector<std::string> Saver::save(Training& training, const Progress& progress) {
  std::vector<std::string> lines = finish();
  const auto begin = std::chrono::steady_clock::now();
  const auto saved = tessera::run_checkpoint(options_.save, progress.step);
  last_ = saved.where.path;
  // A resumed run may come by a step again, so what is there is replaced.
  if (const auto kind = tessera::checkpointer_named(options_.checkpointer)) {
    tessera::Checkpointer checkpointer(*kind, group_,
                                       {.save_overwrite = true, .config = config_text(options_)});
    hold_run([&] {
      checkpointer.save_checkpoint(saved.where, training.model(), training.optimizer(),
                                   olmo_trainer_state(progress, options_));
    });
    grace_.note_save(std::chrono::steady_clock::now() - begin);
    return note(saved);
  }
  tessera::TrainingState state(training.model(), training.optimizer());
  state.values.set_item(kTrainer, trainer_state(progress, options_));
  tessera::SaveOptions how;
  how.overwrite = true;
  how.stop = stop_.get_token();
  if (!writer_) {
    hold_run([&] { tessera::save(state, saved.where, how, group_); });
    grace_.note_save(std::chrono::steady_clock::now() - begin);
    return note(saved);
  }
  hold_run([&] {
    under_way_ = UnderWay{tessera::save(*writer_, state, saved.where, how, group_), saved};
  });
  if (frequency_) frequency_->began(under_way_->pending);
  grace_.began(under_way_->pending);
  lines.push_back("saving " + last_ + " in the background");
  return lines;
}

std::vector<std::string> Saver::finish() {
  if (!under_way_) return {};
  const auto [pending, saved] = *std::exchange(under_way_, std::nullopt);
  hold_run([&pending = pending] { pending.result(); });
  return note(saved);
}

// When it is complete and verified, what --keep no longer wants is removed.
std::vector<std::string> Saver::note(const tessera::RunCheckpoint& saved) const {
  std::vector<std::string> lines = {"saved " + saved.where.path};
  if (options_.keep == 0) return lines;
  const auto report = tessera::retain(options_.save, saved, {.sharded = options_.keep}, group_);
  for (const std::string& warning : report.warnings) lines.push_back("warning: " + warning);
  return lines;
}
