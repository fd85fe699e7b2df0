#include "tessera/lr_scheduler.h"

#include <utility>

#include "optim/lr_schedule.h"
#include "tessera/error.h"

namespace tessera {
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
