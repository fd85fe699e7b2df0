// Trains a byte-level GPT on a text, alone or sharded over ranks, and survives being killed.
//
//   train_gpt --data bible.txt --steps 300 --save run --save-every 50
//   torchrun --no-python --nproc-per-node 2 --max-restarts 3
//       train_gpt --data bible.txt --save run --save-every 50 --resume latest
#include <torch/torch.h>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench.h"
#include "checkpointing.h"
#include "data.h"
#include "metrics.h"
#include "options.h"
#include "schedule.h"
#include "tessera/error.h"
#include "tessera/grace.h"
#include "tessera/run_lease.h"
#include "tessera/trace.h"
#include "training.h"

namespace {

// Rank 0 speaks; the others agree in silence.
void say(const tessera::Mesh& mesh, const std::string& line) {
  if (mesh.rank() == 0) std::cout << line << std::endl;
}

void say_warnings(const tessera::Mesh& mesh, const Progress& progress) {
  for (const std::string& warning : progress.warnings) say(mesh, "warning: " + warning);
}

void say_all(const tessera::Mesh& mesh, const std::vector<std::string>& lines) {
  for (const std::string& line : lines) say(mesh, line);
}

// The timeline of three steps; not of the first one, which has costs of its own.
class Timeline {
 public:
  explicit Timeline(std::string path) : path_(std::move(path)) {}
  void before_step(const Training& training) {
    if (!path_.empty() && ++step_ == 2) trace_.emplace(training.model());
  }
  void after_step(const tessera::Mesh& mesh) {
    if (!trace_ || step_ != 4) return;
    trace_->write(path_, mesh);
    trace_.reset();
  }

 private:
  std::string path_;
  int step_ = 0;
  std::optional<tessera::Trace> trace_;
};

// Returns whether all steps are done; else it was told to end before.
bool train(const Options& options, const tessera::Mesh& mesh) {
  const Text text(options.data, options.seq, options.seed);
  if (!options.save.empty()) require_place(options, mesh.checkpoint_group());
  std::optional<tessera::RunLease> lease;  // before anything of the run is read
  if (!options.save.empty()) lease.emplace(options.save, mesh.checkpoint_group());
  Training training(options, mesh);
  Progress progress;
  if (!options.resume.empty()) {
    progress = resume_training(training, options, mesh.checkpoint_group());
    say_warnings(mesh, progress);
    say(mesh, progress.checkpoint.empty()
                  ? "no checkpoint in " + options.save + " yet: starting afresh"
                  : "resumed from " + progress.checkpoint + " after step " +
                        std::to_string(progress.step));
  }
  // Until now SIGTERM ends the process: there is nothing to save yet.
  tessera::Grace grace(mesh.checkpoint_group(), {.time = std::chrono::seconds(options.grace)});
  Saver saver(options, mesh, grace, lease ? &*lease : nullptr);
  Metrics metrics(mesh.rank() == 0 ? options.metrics : "", progress.step);
  const Schedule schedule{options.lr, options.warmup, options.steps};
  Timeline timeline(options.trace);

  bool is_told_to_end = false;
  while (progress.step < options.steps && !is_told_to_end) {
    const auto start = std::chrono::steady_clock::now();
    StepRow row;
    row.step = progress.step + 1;
    row.lr = schedule.at(progress.step);
    timeline.before_step(training);
    const StepResult result = training.step(text, progress.step, row.lr);
    timeline.after_step(mesh);
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const std::int64_t tokens = options.batch * options.seq;
    progress.step = row.step;
    progress.tokens += tokens;

    const bool is_last = progress.step == options.steps;
    row.loss = result.loss;
    row.grad_norm = result.grad_norm;
    row.tokens_per_second = static_cast<double>(tokens) / taken.count();
    if (options.val_every > 0 && (is_last || progress.step % options.val_every == 0)) {
      row.val_loss = training.validate(text);
    }
    metrics.add(row);
    if (is_last || row.val_loss || progress.step % 10 == 0) say(mesh, to_line(row));

    is_told_to_end = grace.ends();
    if (!is_told_to_end && saver.is_due(progress.step))
      say_all(mesh, saver.save(training, progress));
  }
  const std::string last = checkpoint_path(options, progress.step);
  const bool is_saved = last == saver.last() || last == progress.checkpoint;
  const bool is_time = !is_told_to_end || grace.leaves_time_to_save();
  try {
    if (!options.save.empty() && !is_saved && is_time)
      say_all(mesh, saver.save(training, progress));
    say_all(mesh, saver.finish());
  } catch (const tessera::Error& error) {
    if (error.code() != tessera::ErrorCode::cancelled || !grace.stop().stop_requested()) throw;
    say(mesh, "the last save took too long, and was stopped");
  }
  if (is_told_to_end) {
    say(mesh, "told to end: stopped after step " + std::to_string(progress.step));
  } else if (options.sample > 0) {
    say(mesh, "\n" + training.sample(options.sample));
  }
  return progress.step == options.steps;
}

// A step frees as much as it takes. glibc gives large blocks back to the system by default, and the
// next step pays a page fault every 4 KiB.
void keep_freed_memory() {
#ifdef __GLIBC__
  mallopt(M_MMAP_THRESHOLD, 32 << 20);  // the most that glibc takes
  mallopt(M_TRIM_THRESHOLD, std::numeric_limits<int>::max());
  mallopt(M_TOP_PAD, 16 << 20);
#endif
}

int run(const Options& options) {
  try {
    keep_freed_memory();
    if (options.threads > 0) torch::set_num_threads(options.threads);
    tessera::MeshOptions mesh_options;
    if (options.device == "cpu") mesh_options.device = torch::kCPU;
    // Unless it is told, each rank takes the CUDA device of its LOCAL_RANK, where there is one.
    const auto mesh = tessera::Mesh::from_environment(mesh_options);
    if (options.device == "cuda" && !mesh.device().is_cuda()) {
      throw tessera::Error(tessera::ErrorCode::unsupported,
                           "--device cuda: this libtorch or machine has no CUDA device");
    }
    if (options.sharding == Sharding::none && mesh.size() > 1) {
      throw tessera::Error(tessera::ErrorCode::invalid_argument,
                           "--sharding none is for one rank alone");
    }
    if (options.bench > 0) {
      run_bench(options, mesh);
    } else if (!train(options, mesh)) {
      return 128 + SIGTERM;
    }
    return 0;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    const char* rank = std::getenv("RANK");
    const std::string who = rank != nullptr ? std::string("rank ") + rank + ": " : "";
    std::cerr << "train_gpt: " + who + what.substr(0, what.find('\n')) + "\n";
    return 3;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const CommandLine command = read_command_line(argc, argv);
  return command.exit_code ? *command.exit_code : run(command.options);
}
