#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>

#include "tessera/error.h"

namespace tessera {
namespace {

void require_option(bool is_in_range, const char* option, const std::string& range) {
  if (is_in_range) return;
  throw Error(ErrorCode::invalid_argument, "expected " + range).at_key(option);
}

void require_total_iters(std::int64_t total_iters) {
  require_option(total_iters >= 1, "total_iters", "1 or more");
}

void require_kind(const ConstantLR& of, std::size_t /*groups*/) {
  require_option(of.factor >= 0 && of.factor <= 1, "factor", "0 to 1");
  require_total_iters(of.total_iters);
}
void require_kind(const LinearLR& of, std::size_t /*groups*/) {
  require_option(of.start_factor > 0 && of.start_factor <= 1, "start_factor", "above 0, up to 1");
  require_option(of.end_factor >= 0 && of.end_factor <= 1, "end_factor", "0 to 1");
  require_total_iters(of.total_iters);
}
void require_kind(const CosineAnnealingLR& of, std::size_t /*groups*/) {
  require_option(of.t_max >= 1 && of.t_max <= detail::kMostEpochs, "T_max", "1 to 2^53");
  require_option(of.eta_min >= 0, "eta_min", "0 or more");
}
void require_kind(const LambdaLR& of, std::size_t groups) {
  const auto count = of.lr_lambdas.size();
  require_option(count == 1 || count == groups, "lr_lambdas",
                 "one function, or one for each of " + std::to_string(groups) + " groups");
  require_option(std::ranges::all_of(of.lr_lambdas, [](const auto& one) { return one != nullptr; }),
                 "lr_lambdas", "functions");
}
void require_kind(const SequentialLR& of, std::size_t groups) {
  require_option(!of.schedulers.empty(), "_schedulers", "one schedule or more");
  require_option(of.milestones.size() + 1 == of.schedulers.size(), "_milestones",
                 "one milestone less than schedules");
  std::int64_t last = 0;
  for (const auto milestone : of.milestones) {
    require_option(milestone > last, "_milestones", "epochs that rise, from 1");
    last = milestone;
  }
  for (const auto& one : of.schedulers) detail::require_valid(one, groups);
}

struct Moment {
  std::size_t group;
  double base_lr;
  std::int64_t epoch;
};

double rate_at(const ConstantLR& of, const Moment& at) {
  return at.epoch < of.total_iters ? at.base_lr * of.factor : at.base_lr;
}
double rate_at(const LinearLR& of, const Moment& at) {
  // At the end exactly the end.
  if (at.epoch >= of.total_iters) return at.base_lr * of.end_factor;
  const double part = static_cast<double>(at.epoch) / static_cast<double>(of.total_iters);
  return at.base_lr * (of.start_factor + (of.end_factor - of.start_factor) * part);
}
double rate_at(const CosineAnnealingLR& of, const Moment& at) {
  // Of whole periods nothing but rounding would be left.
  const auto phase = at.epoch % (2 * of.t_max);
  const double angle =
      std::numbers::pi * static_cast<double>(phase) / static_cast<double>(of.t_max);
  return of.eta_min + (at.base_lr - of.eta_min) * (1 + std::cos(angle)) / 2;
}
double rate_at(const LambdaLR& of, const Moment& at) {
  return at.base_lr * of.lr_lambdas[of.lr_lambdas.size() == 1 ? 0 : at.group](at.epoch);
}
double rate_at(const SequentialLR& of, const Moment& at) {
  const auto passed = std::ranges::upper_bound(of.milestones, at.epoch) - of.milestones.begin();
  const auto part = static_cast<std::size_t>(passed);
  return detail::rate_of(of.schedulers[part], at.group, at.base_lr,
                         detail::epoch_of_part(of.milestones, part, at.epoch));
}

}  // namespace

double detail::rate_of(const Schedule& schedule, std::size_t group, double base_lr,
                       std::int64_t epoch) {
  const Moment at{group, base_lr, epoch};
  return std::visit([&](const auto& kind) { return rate_at(kind, at); }, schedule.kind());
}

void detail::require_valid(const Schedule& schedule, std::size_t groups) {
  std::visit([&](const auto& kind) { require_kind(kind, groups); }, schedule.kind());
}

void detail::require_rate(double rate) {
  if (rate >= 0) return;
  throw Error(ErrorCode::invalid_argument,
              "a learning rate of " + std::to_string(rate) + ", expected 0 or more");
}

std::int64_t detail::epoch_of_part(const std::vector<std::int64_t>& milestones, std::size_t part,
                                   std::int64_t epoch) {
  const auto begin = part == 0 ? 0 : milestones[part - 1];
  const auto end =
      part < milestones.size() ? milestones[part] : std::numeric_limits<std::int64_t>::max();
  return epoch < begin ? -1 : std::min(epoch, end - 1) - begin;
}

}  // namespace tessera
