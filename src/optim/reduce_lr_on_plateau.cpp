#include <algorithm>
#include <limits>
#include <string>

#include "optim/fields.h"
#include "optim/lr_schedule.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"

namespace tessera {
namespace {

const char* name_of_mode(PlateauMode mode) {
  return mode == PlateauMode::min ? "min" : "max";
}
const char* name_of_mode(ThresholdMode mode) {
  return mode == ThresholdMode::rel ? "rel" : "abs";
}

template <typename Mode>
Mode mode_in(const Value& state, const char* key, Mode one, Mode other) {
  const auto& name = state.at(key).as_string();
  for (const auto mode : {one, other}) {
    if (name == name_of_mode(mode)) return mode;
  }
  throw Error(ErrorCode::invalid_argument,
              "'" + name + "', expected " + name_of_mode(one) + " or " + name_of_mode(other))
      .at_key(key);
}

double worst(PlateauMode mode) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  return mode == PlateauMode::min ? kInfinity : -kInfinity;
}

void require_plateau_option(bool is_in_range, const char* option, const char* range) {
  if (is_in_range) return;
  throw Error(ErrorCode::invalid_argument, std::string("expected ") + range).at_key(option);
}

// Checks the options of an optimizer of `groups` groups.
void require_options(const PlateauOptions& options, std::size_t groups) {
  require_plateau_option(options.factor >= 0 && options.factor < 1, "factor", "0 to below 1");
  const auto count = options.min_lr.size();
  require_plateau_option(count == 1 || count == groups, "min_lr",
                         "one number, or one for each group");
  for (const double rate : options.min_lr) require_plateau_option(rate >= 0, "min_lr", "0 or more");
}

std::vector<double> min_rates(const PlateauOptions& options, std::size_t groups) {
  return options.min_lr.size() == 1 ? std::vector<double>(groups, options.min_lr.front())
                                    : options.min_lr;
}

PlateauOptions options_in(const Value& state) {
  PlateauOptions options;
  options.mode = mode_in(state, "mode", PlateauMode::min, PlateauMode::max);
  options.factor = detail::number_of(state.at("factor"));
  options.patience = state.at("patience").as_int();
  options.threshold = detail::number_of(state.at("threshold"));
  options.threshold_mode = mode_in(state, "threshold_mode", ThresholdMode::rel, ThresholdMode::abs);
  options.cooldown = state.at("cooldown").as_int();
  const auto& of_all = state.at("default_min_lr");
  options.min_lr = of_all.is(Value::Kind::none) ? detail::numbers_in(state, "min_lrs")
                                                : std::vector{detail::number_of(of_all)};
  options.eps = detail::number_of(state.at("eps"));
  return options;
}

}  // namespace

ReduceLROnPlateau::ReduceLROnPlateau(OptimizerRef optimizer, PlateauOptions options)
    : optimizer_(std::move(optimizer)),
      options_(std::move(options)),
      last_lr_(detail::rates_in(optimizer_)) {
  require_options(options_, last_lr_.size());
  progress_.best = worst(options_.mode);
}

bool ReduceLROnPlateau::is_better(double metric) const noexcept {
  const double best = progress_.best, threshold = options_.threshold;
  const bool is_relative = options_.threshold_mode == ThresholdMode::rel;
  if (options_.mode == PlateauMode::min)
    return metric < (is_relative ? best * (1.0 - threshold) : best - threshold);
  return metric > (is_relative ? best * (threshold + 1.0) : best + threshold);
}

void ReduceLROnPlateau::reduce_lr() {
  auto rates = detail::rates_in(optimizer_);
  const auto least = min_rates(options_, rates.size());
  for (std::size_t g = 0; g < rates.size(); ++g) {
    const double reduced = std::max(rates[g] * options_.factor, least[g]);
    if (rates[g] - reduced > options_.eps) rates[g] = reduced;
  }
  detail::set_rates(optimizer_, rates);
}

void ReduceLROnPlateau::step(double metric) {
  detail::require_groups(optimizer_, last_lr_.size());
  ++progress_.last_epoch;
  if (is_better(metric)) {
    progress_.best = metric;
    progress_.num_bad_epochs = 0;
  } else {
    ++progress_.num_bad_epochs;
  }
  if (progress_.cooldown_counter > 0) {
    --progress_.cooldown_counter;
    progress_.num_bad_epochs = 0;
  }
  if (progress_.num_bad_epochs > options_.patience) {
    reduce_lr();
    progress_.cooldown_counter = options_.cooldown;
    progress_.num_bad_epochs = 0;
  }
  last_lr_ = detail::rates_in(optimizer_);
}

Value ReduceLROnPlateau::state_dict() const {
  const auto least = detail::list_of_numbers(min_rates(options_, last_lr_.size()));
  const bool is_one = options_.min_lr.size() == 1;
  return Value::dict({{"factor", options_.factor},
                      {"default_min_lr", is_one ? Value(options_.min_lr.front()) : Value()},
                      {"min_lrs", least},
                      {"patience", options_.patience},
                      {"cooldown", options_.cooldown},
                      {"eps", options_.eps},
                      {"last_epoch", progress_.last_epoch},
                      {"_last_lr", detail::list_of_numbers(last_lr_)},
                      {"mode_worse", worst(options_.mode)},
                      {"mode", name_of_mode(options_.mode)},
                      {"threshold", options_.threshold},
                      {"threshold_mode", name_of_mode(options_.threshold_mode)},
                      {"best", progress_.best},
                      {"cooldown_counter", progress_.cooldown_counter},
                      {"num_bad_epochs", progress_.num_bad_epochs}});
}

void ReduceLROnPlateau::load_state_dict(const Value& state) {
  auto options = options_in(state);
  auto rates = detail::numbers_in(state, "_last_lr");
  require_options(options, rates.size());
  const Progress progress{.last_epoch = detail::count_in(state, "last_epoch"),
                          .cooldown_counter = detail::count_in(state, "cooldown_counter"),
                          .num_bad_epochs = detail::count_in(state, "num_bad_epochs"),
                          .best = detail::number_of(state.at("best"))};
  detail::set_rates(optimizer_, rates);
  options_ = std::move(options);
  progress_ = progress;
  last_lr_ = std::move(rates);
}

}  // namespace tessera
