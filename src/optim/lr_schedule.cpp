#include "optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>
#include <string>
#include <type_traits>
#include <utility>

#include "optim/fields.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"

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
  // Nothing but rounding would be left of whole periods.
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

namespace {

using detail::ScheduleProgress;

// The numbers of a schedule under PyTorch's names: one list for saving and loading.
template <typename Of, typename Visit>
void visit_options(Of& of, const Visit& visit) {
  using Kind = std::remove_const_t<Of>;
  if constexpr (std::is_same_v<Kind, ConstantLR>) {
    visit("factor", of.factor);
    visit("total_iters", of.total_iters);
  } else if constexpr (std::is_same_v<Kind, LinearLR>) {
    visit("start_factor", of.start_factor);
    visit("end_factor", of.end_factor);
    visit("total_iters", of.total_iters);
  } else if constexpr (std::is_same_v<Kind, CosineAnnealingLR>) {
    visit("T_max", of.t_max);
    visit("eta_min", of.eta_min);
  }
}

template <typename Kind>
Value state_of_kind(const Kind& of, const ScheduleProgress& progress) {
  auto state = Value::dict();
  visit_options(of, [&](const char* name, const auto& field) { state.set_item(name, field); });
  state.set_item("base_lrs", detail::list_of_numbers(progress.base_lrs));
  state.set_item("last_epoch", progress.last_epoch);
  // PyTorch counts the call that its constructor makes.
  state.set_item("_step_count", std::max<std::int64_t>(progress.last_epoch + 1, 1));
  state.set_item("_is_initial", false);
  state.set_item("_get_lr_called_within_step", false);
  state.set_item("_last_lr", detail::list_of_numbers(progress.last_lr));
  if constexpr (std::is_same_v<Kind, LambdaLR>) {
    state.set_item("lr_lambdas", Value::list(Value::List(progress.base_lrs.size())));
  }
  return state;
}

ScheduleProgress progress_of_part(const SequentialLR& of, std::size_t part,
                                  const ScheduleProgress& whole) {
  ScheduleProgress progress;
  progress.last_epoch = detail::epoch_of_part(of.milestones, part, whole.last_epoch);
  progress.base_lrs = whole.base_lrs;
  for (std::size_t g = 0; g < whole.base_lrs.size(); ++g) {
    progress.last_lr.push_back(detail::rate_of(of.schedulers[part], g, whole.base_lrs[g],
                                               std::max<std::int64_t>(progress.last_epoch, 0)));
  }
  return progress;
}

Value state_of_kind(const SequentialLR& of, const ScheduleProgress& progress) {
  Value::List milestones, parts;
  for (const auto milestone : of.milestones) milestones.emplace_back(milestone);
  for (std::size_t part = 0; part < of.schedulers.size(); ++part)
    parts.push_back(detail::state_of(of.schedulers[part], progress_of_part(of, part, progress)));
  return Value::dict({{"_milestones", Value::list(std::move(milestones))},
                      {"last_epoch", progress.last_epoch},
                      {"_last_lr", detail::list_of_numbers(progress.last_lr)},
                      {"_schedulers", Value::list(std::move(parts))}});
}

template <typename Kind>
ScheduleProgress take_kind(Kind& of, const Value& state) {
  visit_options(of, [&](const char* name, auto& field) {
    if constexpr (std::is_same_v<decltype(field), double&>) {
      field = detail::number_of(state.at(name));
    } else {
      field = state.at(name).as_int();
    }
  });
  // Nothing else tells the state of a LambdaLR from that of another schedule.
  if constexpr (std::is_same_v<Kind, LambdaLR>) static_cast<void>(state.at("lr_lambdas"));
  return {state.at("last_epoch").as_int(), detail::numbers_in(state, "base_lrs"),
          detail::numbers_in(state, "_last_lr")};
}

ScheduleProgress take_kind(SequentialLR& of, const Value& state) {
  const auto& parts = state.at("_schedulers").items();
  if (parts.size() != of.schedulers.size()) {
    throw Error(ErrorCode::mismatch, "the state of " + std::to_string(parts.size()) +
                                         " schedules, and there are " +
                                         std::to_string(of.schedulers.size()))
        .at_key("_schedulers");
  }
  of.milestones.clear();
  for (const auto& milestone : state.at("_milestones").items())
    of.milestones.push_back(milestone.as_int());
  ScheduleProgress progress;
  for (std::size_t part = parts.size(); part-- > 0;)
    progress = detail::take_state(of.schedulers[part], parts[part]);
  // The base rates are those of each part; the rest is said of the whole.
  progress.last_epoch = state.at("last_epoch").as_int();
  progress.last_lr = detail::numbers_in(state, "_last_lr");
  return progress;
}

}  // namespace

Value detail::state_of(const Schedule& schedule, const ScheduleProgress& progress) {
  return std::visit([&](const auto& kind) { return state_of_kind(kind, progress); },
                    schedule.kind());
}

ScheduleProgress detail::take_state(Schedule& schedule, const Value& state) {
  return std::visit([&](auto& kind) { return take_kind(kind, state); }, schedule.kind());
}

Value detail::list_of_numbers(const std::vector<double>& numbers) {
  return Value::list(Value::List(numbers.begin(), numbers.end()));
}

std::vector<double> detail::numbers_in(const Value& state, const char* key) {
  std::vector<double> numbers;
  for (const auto& number : state.at(key).items()) numbers.push_back(number_of(number));
  return numbers;
}

std::int64_t detail::count_in(const Value& state, const char* key) {
  const auto count = state.at(key).as_int();
  if (count >= 0 && count <= kMostEpochs) return count;
  throw Error(ErrorCode::invalid_argument, std::to_string(count) + ", expected 0 to 2^53")
      .at_key(key);
}

std::vector<double> detail::rates_in(const OptimizerRef& optimizer) {
  std::vector<double> rates(group_count(optimizer));
  for (std::size_t g = 0; g < rates.size(); ++g) rates[g] = get_lr(optimizer, g);
  return rates;
}

void detail::require_groups(const OptimizerRef& optimizer, std::size_t count) {
  const auto groups = group_count(optimizer);
  if (groups == count) return;
  throw Error(ErrorCode::mismatch, "learning rates of " + std::to_string(count) +
                                       " groups, and the optimizer has " + std::to_string(groups));
}

void detail::set_rates(const OptimizerRef& optimizer, const std::vector<double>& rates) {
  require_groups(optimizer, rates.size());
  for (const double rate : rates) require_rate(rate);
  for (std::size_t g = 0; g < rates.size(); ++g) set_lr(optimizer, g, rates[g]);
}

namespace {

std::vector<double> rates_at(const Schedule& schedule, const std::vector<double>& base_lrs,
                             std::int64_t epoch) {
  std::vector<double> rates(base_lrs.size());
  for (std::size_t g = 0; g < rates.size(); ++g)
    rates[g] = detail::rate_of(schedule, g, base_lrs[g], epoch);
  return rates;
}

void require_base_rates(const detail::ScheduleProgress& progress) {
  if (progress.base_lrs.size() != progress.last_lr.size()) {
    throw Error(ErrorCode::mismatch, "base rates and rates are of different numbers of groups")
        .at_key("base_lrs");
  }
  for (const double rate : progress.base_lrs) detail::require_rate(rate);
}

}  // namespace

LRScheduler::LRScheduler(OptimizerRef optimizer, Schedule schedule)
    : optimizer_(std::move(optimizer)),
      schedule_(std::move(schedule)),
      base_lrs_(detail::rates_in(optimizer_)) {
  detail::require_valid(schedule_, base_lrs_.size());
  last_lr_ = rates_at(schedule_, base_lrs_, 0);
  detail::set_rates(optimizer_, last_lr_);
}

void LRScheduler::step() {
  auto rates = rates_at(schedule_, base_lrs_, last_epoch_ + 1);
  detail::set_rates(optimizer_, rates);
  last_lr_ = std::move(rates);
  ++last_epoch_;
}

Value LRScheduler::state_dict() const {
  return detail::state_of(schedule_, {last_epoch_, base_lrs_, last_lr_});
}

void LRScheduler::load_state_dict(const Value& state) {
  auto schedule = schedule_;
  auto progress = detail::take_state(schedule, state);
  progress.last_epoch = detail::count_in(state, "last_epoch");
  detail::require_valid(schedule, progress.base_lrs.size());
  require_base_rates(progress);
  detail::set_rates(optimizer_, progress.last_lr);
  schedule_ = std::move(schedule);
  base_lrs_ = std::move(progress.base_lrs);
  last_lr_ = std::move(progress.last_lr);
  last_epoch_ = progress.last_epoch;
}

}  // namespace tessera
