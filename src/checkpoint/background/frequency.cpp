#include "checkpoint/background/frequency.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "base/log.h"
#include "comm/confer.h"
#include "comm/message.h"
#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "tessera/library.h"
#include "tessera/save_frequency.h"

namespace tessera {

void StepCosts::add_step(double seconds, bool saving) {
  constexpr std::size_t kSteps = 101;
  if (saving) {
    present_ += seconds;
    ++present_steps_;
    return;
  }
  steps_.push_back(seconds);
  if (steps_.size() > kSteps) steps_.pop_front();
}

void StepCosts::end_save(bool counts) {
  constexpr std::size_t kSaves = 4;
  if (counts)
    saves_.push_back(std::max(0.0, present_ - step() * static_cast<double>(present_steps_)));
  if (saves_.size() > kSaves) saves_.pop_front();
  present_ = 0;
  present_steps_ = 0;
}

double StepCosts::step() const {
  if (steps_.empty()) return 0;
  std::vector<double> sorted(steps_.begin(), steps_.end());
  const auto middle = sorted.begin() + static_cast<std::ptrdiff_t>(sorted.size() / 2);
  std::ranges::nth_element(sorted, middle);
  return *middle;
}

std::optional<double> StepCosts::save() const {
  if (saves_.empty()) return std::nullopt;
  return std::accumulate(saves_.begin(), saves_.end(), 0.0) / static_cast<double>(saves_.size());
}

namespace {

constexpr std::int64_t kMostSteps = 1'000'000'000'000'000;

std::int64_t bounded(std::int64_t apart, const FrequencyOptions& options) {
  const auto least = std::min(options.least, kMostSteps);
  const auto most = options.most > 0 ? std::min(options.most, kMostSteps) : kMostSteps;
  return std::clamp(apart, least, most);
}

}  // namespace

std::int64_t steps_apart(double save_seconds, double step_seconds,
                         const FrequencyOptions& options) {
  constexpr auto kAll = static_cast<double>(kMostSteps);
  const double steps =
      step_seconds > 0 ? std::ceil(save_seconds / (options.share * step_seconds)) : kAll;
  return bounded(static_cast<std::int64_t>(std::clamp(steps, 1.0, kAll)), options);
}

namespace {

// What ranks tell each other where a save may be due: of all of them the worst.
struct WorstRank {
  double step = 0;
  std::optional<double> save = {};
  bool is_saving = false;
};
auto fields(FieldsOf<WorstRank> auto& rank) {
  return std::tie(rank.step, rank.save, rank.is_saving);
}

WorstRank worst_of(Group& group, const WorstRank& mine) {
  const Purpose purpose("asking whether a save is due");
  const auto join = [](WorstRank& all, const WorstRank& more) {
    all.step = std::max(all.step, more.step);
    if (more.save) all.save = std::max(all.save.value_or(0), *more.save);
    all.is_saving = all.is_saving || more.is_saving;
  };
  const auto conference =
      conference_of([&] { return mine; }, join, [](const WorstRank& all) { return all; });
  return from_message<WorstRank>(confer(group, "asking whether a save is due", conference));
}

const FrequencyOptions& require_meant(const FrequencyOptions& options) {
  constexpr std::int64_t kLeastFirst = 3;  // some steps are measured before
  const auto refuse = [](const std::string& what, const std::string& expected) {
    throw Error(ErrorCode::invalid_argument,
                "FrequencyOptions::" + what + ", expected " + expected);
  };
  if (!(options.share > 0 && options.share <= 1))
    refuse(fmt::format("share is {}", options.share), "more than 0 and at most 1");
  if (options.first < kLeastFirst) refuse(fmt::format("first is {}", options.first), "3 or more");
  if (options.least < 1) refuse(fmt::format("least is {}", options.least), "1 or more");
  if (options.most != 0 && options.most < options.least) {
    refuse(fmt::format("most is {}", options.most),
           fmt::format("0, or `least` ({}) or more", options.least));
  }
  return options;
}

}  // namespace

class SaveFrequency::Costs {
 public:
  explicit Costs(const FrequencyOptions& options) : options_(options), next_(options.first) {}

  bool due(Group& group) {
    end_step();
    const bool is_due = step_ >= next_ && is_due_on_all(group);
    if (is_due) {
      saved_ = step_;
      is_saving_ = true;
      pending_.reset();
      next_ = step_ + 1;
    }
    begun_ = Clock::now();
    return is_due;
  }
  void began(PendingSave save) {
    pending_ = std::move(save);
    is_in_background_ = true;
  }
  [[nodiscard]] std::int64_t distance() const noexcept { return distance_; }

 private:
  using Clock = std::chrono::steady_clock;

  // The first step of a program may do what no other does.
  void end_step() {
    ++step_;
    if (begun_ && step_ > 2)
      costs_.add_step(std::chrono::duration<double>(Clock::now() - *begun_).count(), is_saving_);
    if (!is_saving_ || (pending_ && !pending_->done())) return;
    costs_.end_save(pending_ ? !pending_->failed() : !is_in_background_);
    is_saving_ = false;
  }

  bool is_due_on_all(Group& group) {
    const WorstRank worst = worst_of(group, {costs_.step(), costs_.save(), is_saving_});
    if (worst.is_saving) {
      next_ = step_ + std::max<std::int64_t>(1, (step_ - saved_) / 4);
      return false;
    }
    if (saved_ == 0) return true;
    const auto apart = worst.save ? steps_apart(*worst.save, worst.step, options_)
                                  : bounded(options_.first, options_);
    if (worst.save && apart != distance_) {
      log(LogLevel::info,
          fmt::format("saves every {} steps from now on: a save costs {:.3f} s, a step takes "
                      "{:.3f} s, and saves may take {} % of the time",
                      apart, *worst.save, worst.step, 100 * options_.share));
    }
    if (worst.save) distance_ = apart;
    next_ = std::max(step_, saved_ + apart);
    return step_ >= next_;
  }

  const FrequencyOptions options_;
  StepCosts costs_;
  std::int64_t step_ = 0;   // due() was called behind it
  std::int64_t next_;       // at which ranks ask each other
  std::int64_t saved_ = 0;  // of the last save
  std::int64_t distance_ = 0;
  bool is_saving_ = false;
  bool is_in_background_ = false;  // began() was called: a save without it has failed
  std::optional<PendingSave> pending_;
  std::optional<Clock::time_point> begun_;  // the present step
};

SaveFrequency::SaveFrequency(Group& group, const FrequencyOptions& options)
    : group_(group), costs_(std::make_unique<Costs>(require_meant(options))) {}

SaveFrequency::SaveFrequency(const FrequencyOptions& options)
    : alone_(solo_group()),
      group_(*alone_),
      costs_(std::make_unique<Costs>(require_meant(options))) {}

SaveFrequency::~SaveFrequency() = default;

bool SaveFrequency::due() {
  return costs_->due(group_);
}

void SaveFrequency::began(PendingSave save) {
  costs_->began(std::move(save));
}

std::int64_t SaveFrequency::distance() const noexcept {
  return costs_->distance();
}

}  // namespace tessera
