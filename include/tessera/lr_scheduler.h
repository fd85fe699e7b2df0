// Learning rates that change while a training goes on: PyTorch's torch.optim.lr_scheduler.
//
//   const LinearLR warm_up{.start_factor = 0.01, .total_iters = 50};
//   const CosineAnnealingLR decay{.t_max = 950};
//   LRScheduler scheduler(optimizer, SequentialLR{{warm_up, decay}, {50}});
//   TrainingState state(model, optimizer);
//   state.values["lr_scheduler"] = scheduler.state_dict();
//   load(state, "run/latest", mesh.checkpoint_group());  // to go on where a training has ended
//   scheduler.load_state_dict(state.values["lr_scheduler"]);
//   while (scheduler.last_epoch() < 1000) {
//     train(1);
//     optimizer.step();
//     scheduler.step();
//   }
//   state.values["lr_scheduler"] = scheduler.state_dict();
//   save(state, "run/step1000", mesh.checkpoint_group());
//
// A scheduler works on any optimizer that OptimizerRef knows. The optimizer must outlive it, stay
// where it is and keep its groups (else `mismatch`). Nothing here communicates: every rank makes
// the same calls and gets the same rates. One thread uses scheduler and optimizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <utility>
#include <variant>
#include <vector>

#include "tessera/optimizer_ref.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// Options of one group of an optimizer, as in Python optimizer.param_groups[group]["lr"].
//
//   set_lr(optimizer, 0, 0.5 * get_lr(optimizer, 0));
//   set_weight_decay(optimizer, 1, 0.0);
//
// They take whatever OptimizerRef takes: AdamW, optimizers of torch::optim, optimizers of your own.
// (AdamW::options gives the same by reference.) Local: ranks that train together set the same. Use
// them from the thread that steps the optimizer.
//
// A group that is not there is `invalid_argument`, and so is a number below 0 or that is none; then
// nothing was changed. `unsupported`: the optimizer has no such option (LBFGS no weight decay).

[[nodiscard]] std::size_t group_count(const OptimizerRef& optimizer);

[[nodiscard]] double get_lr(const OptimizerRef& optimizer, std::size_t group);
void set_lr(const OptimizerRef& optimizer, std::size_t group, double lr);

[[nodiscard]] double get_weight_decay(const OptimizerRef& optimizer, std::size_t group);
void set_weight_decay(const OptimizerRef& optimizer, std::size_t group, double weight_decay);

// Schedules. In epoch t, the number of `step` calls so far, a group has the rate that is given
// here, whatever its rate was before: schedules are not chained. `base` is the group's rate when
// the scheduler was made. Names, defaults and rates are PyTorch's, the rates but for rounding:
// PyTorch computes most of them from those of epoch t - 1.

// base * factor before epoch total_iters, then base. factor: 0 to 1; total_iters: 1 or more.
struct ConstantLR {
  double factor = 1.0 / 3;
  std::int64_t total_iters = 5;
};

// base times a factor that goes from start_factor (above 0, up to 1) in epoch 0 to end_factor (0 to
// 1) in epoch total_iters (1 or more) in a straight line, and then stays.
struct LinearLR {
  double start_factor = 1.0 / 3;
  double end_factor = 1.0;
  std::int64_t total_iters = 5;
};

// eta_min + (base - eta_min) * (1 + cos(pi * t / t_max)) / 2. After t_max the rate rises again, as
// in PyTorch. eta_min: 0 or more; t_max (PyTorch's T_max): 1 to 2^53, and must be given.
struct CosineAnnealingLR {
  std::int64_t t_max = 0;
  double eta_min = 0;
};

// base * lr_lambda(t): one function for all groups, or one for each. They must give every rank the
// same, 0 or more. A state dict does not have them.
struct LambdaLR {
  std::vector<std::function<double(std::int64_t epoch)>> lr_lambdas;
};

// One schedule after the other: schedulers[0] before epoch milestones[0], then schedulers[1], for
// which that epoch is 0, and so on. Milestones rise, from 1; there is one less than schedules.
class Schedule;
struct SequentialLR {
  std::vector<Schedule> schedulers;
  std::vector<std::int64_t> milestones;
};

// Any of them. Functions make it from their argument.
class Schedule {
 public:
  using Kind = std::variant<ConstantLR, LinearLR, CosineAnnealingLR, LambdaLR, SequentialLR>;
  Schedule(ConstantLR kind) : kind_(kind) {}               // NOLINT(*-explicit-*)
  Schedule(LinearLR kind) : kind_(kind) {}                 // NOLINT(*-explicit-*)
  Schedule(CosineAnnealingLR kind) : kind_(kind) {}        // NOLINT(*-explicit-*)
  Schedule(LambdaLR kind) : kind_(std::move(kind)) {}      // NOLINT(*-explicit-*)
  Schedule(SequentialLR kind) : kind_(std::move(kind)) {}  // NOLINT(*-explicit-*)
  [[nodiscard]] const Kind& kind() const noexcept { return kind_; }
  [[nodiscard]] Kind& kind() noexcept { return kind_; }

 private:
  Kind kind_;
};

// Sets the rates of an optimizer's groups by a schedule.
class LRScheduler {
 public:
  // Takes the groups' rates as their base rates and gives them those of epoch 0. Throws
  // `invalid_argument` for options that are out of range. So make it before the optimizer's state
  // is loaded, or load the scheduler's state as well.
  LRScheduler(OptimizerRef optimizer, Schedule schedule);

  // The next epoch: call it after the optimizer's step. Throws `invalid_argument` if a function of
  // LambdaLR gives a rate below 0 or no number. Nothing is changed then.
  void step();

  // The rates of this epoch and the base rates, one for each group.
  [[nodiscard]] const std::vector<double>& get_last_lr() const noexcept { return last_lr_; }
  [[nodiscard]] const std::vector<double>& base_lrs() const noexcept { return base_lrs_; }
  [[nodiscard]] std::int64_t last_epoch() const noexcept { return last_epoch_; }

  // What a checkpoint needs, with PyTorch's keys for this schedule: "last_epoch", "base_lrs",
  // "_last_lr", "T_max", ... The same on every rank.
  [[nodiscard]] Value state_dict() const;
  // Continues from such a tree, made by Tessera or PyTorch, and gives the groups its "_last_lr". As
  // in PyTorch the schedule's numbers become those of the tree too. Throws `not_found` for a
  // missing entry (it is another schedule's), `mismatch` for one of another type or number of
  // groups, `invalid_argument` for numbers that are out of range. Nothing is changed then.
  void load_state_dict(const Value& state);

 private:
  OptimizerRef optimizer_;
  Schedule schedule_;
  std::vector<double> base_lrs_, last_lr_;
  std::int64_t last_epoch_ = 0;
};

enum class PlateauMode : std::uint8_t { min, max };
enum class ThresholdMode : std::uint8_t { rel, abs };

struct PlateauOptions {
  PlateauMode mode = PlateauMode::min;  // min: a smaller metric is better
  double factor = 0.1;                  // 0 to below 1
  std::int64_t patience = 10;           // epochs in a row that may be no better than the best
  double threshold = 1e-4;              // by which a metric has to be better than the best
  ThresholdMode threshold_mode = ThresholdMode::rel;  // rel: a share of the best; abs: as it is
  std::int64_t cooldown = 0;         // epochs after a reduction in which none counts as no better
  std::vector<double> min_lr = {0};  // 0 or more, for all groups or for each
  double eps = 1e-8;                 // smaller changes of a rate are not made
};

// Multiplies the rates by `factor` when a metric has not become better for `patience` epochs.
class ReduceLROnPlateau {
 public:
  // Changes no rate. Throws `invalid_argument` for options that are out of range.
  explicit ReduceLROnPlateau(OptimizerRef optimizer, PlateauOptions options = {});

  // The end of an epoch. Every rank gives the same metric, such as a mean that
  // Mesh::all_reduce_sum has made: else their rates part. One that is no number is never better.
  void step(double metric);

  [[nodiscard]] const std::vector<double>& get_last_lr() const noexcept { return last_lr_; }

  // As those of LRScheduler, with the keys of PyTorch's ReduceLROnPlateau: "best",
  // "num_bad_epochs", "cooldown_counter", ...
  [[nodiscard]] Value state_dict() const;
  void load_state_dict(const Value& state);

 private:
  struct Progress {
    std::int64_t last_epoch = 0, cooldown_counter = 0, num_bad_epochs = 0;
    double best = std::numeric_limits<double>::infinity();
  };
  [[nodiscard]] bool is_better(double metric) const noexcept;
  void reduce_lr();

  OptimizerRef optimizer_;
  PlateauOptions options_;
  Progress progress_;
  std::vector<double> last_lr_;
};

}  // namespace tessera
