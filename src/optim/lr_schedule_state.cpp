#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>

#include "optim/fields.h"
#include "optim/lr_schedule.h"
#include "tessera/error.h"
#include "tessera/param_groups.h"

namespace tessera {
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

}  // namespace tessera
