// The rates of a schedule, and its part of a state dict.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/lr_scheduler.h"

namespace tessera::detail {

// The rate of `group` in `epoch`, 0 or later.
[[nodiscard]] double rate_of(const Schedule& schedule, std::size_t group, double base_lr,
                             std::int64_t epoch);
// Throws `invalid_argument` for numbers that are out of range in an optimizer of `groups` groups.
void require_valid(const Schedule& schedule, std::size_t groups);
// Throws `invalid_argument` unless it is 0 or more.
void require_rate(double rate);
// More than any training takes; what is computed from it and less cannot overflow.
inline constexpr std::int64_t kMostEpochs = std::int64_t{1} << 53;
// The number under `key`. Throws `invalid_argument` unless it is 0 to kMostEpochs.
[[nodiscard]] std::int64_t count_in(const Value& state, const char* key);

// The epoch in which one of SequentialLR's schedules is when all of it is in `epoch`; -1: it has
// not begun.
[[nodiscard]] std::int64_t epoch_of_part(const std::vector<std::int64_t>& milestones,
                                         std::size_t part, std::int64_t epoch);

// How far a scheduler is. An epoch of -1: it has not begun.
struct ScheduleProgress {
  std::int64_t last_epoch = 0;
  std::vector<double> base_lrs, last_lr;
};

[[nodiscard]] Value state_of(const Schedule& schedule, const ScheduleProgress& progress);
// Gives `schedule` the numbers of `state`, and returns how far that is. What it throws leaves
// `schedule` as good as lost.
[[nodiscard]] ScheduleProgress take_state(Schedule& schedule, const Value& state);

// "base_lrs" and the like.
[[nodiscard]] Value list_of_numbers(const std::vector<double>& numbers);
[[nodiscard]] std::vector<double> numbers_in(const Value& state, const char* key);

// The rates of all groups.
[[nodiscard]] std::vector<double> rates_in(const OptimizerRef& optimizer);
// Throws `mismatch` unless the optimizer has so many.
void require_groups(const OptimizerRef& optimizer, std::size_t count);
// What require_groups and require_rate throw comes before any group was changed.
void set_rates(const OptimizerRef& optimizer, const std::vector<double>& rates);

}  // namespace tessera::detail
