#include "checkpoint/background/overlap.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "base/log.h"

namespace tessera {
namespace {

constexpr std::size_t kMeasuredEach = 3;

double median_seconds(std::vector<std::chrono::nanoseconds> times) {
  std::ranges::sort(times);
  return std::chrono::duration<double>(times[times.size() / 2]).count();
}

}  // namespace

// Returns whether there was none, or it had a step before it and behind it.
bool OverlapChoice::note_last() {
  if (!watch_) return true;
  const auto time = watch_->between();
  if (counts_ && time) taken_.at(was_beside_ ? 1 : 0).push_back(*time);
  if (watch_->has_failed()) note_change();
  watch_.reset();
  return time.has_value();
}

void OverlapChoice::note_change() {
  if (!is_measured_ || how_ == Overlap::never) return;
  how_ = Overlap::never;
  log(LogLevel::info,
      "saves in the background wait for their copy from now on: what they save changes between a "
      "save and the next step of the optimizer");
}

void OverlapChoice::choose() {
  const double waiting = median_seconds(taken_[0]);
  const double beside = median_seconds(taken_[1]);
  how_ = beside < waiting ? Overlap::always : Overlap::never;
  log(LogLevel::info,
      fmt::format(
          "saves in the background {} from now on: a step with a save takes {:.3f} s when "
          "the copy is waited for, and {:.3f} s when it is made beside the step",
          how_ == Overlap::always ? "are copied beside the next step" : "wait for their copy",
          waiting, beside));
}

bool OverlapChoice::is_beside_step(std::function<void()> require_unchanged) {
  const bool is_alone = note_last();
  const bool is_known = taken_[0].size() >= kMeasuredEach && taken_[1].size() >= kMeasuredEach;
  if (how_ == Overlap::measured && is_known) choose();
  if (how_ != Overlap::measured) return how_ == Overlap::always;
  counts_ = !std::exchange(is_first_, false) && is_alone;
  was_beside_ = counts_ && taken_[1].size() < taken_[0].size();
  watch_.emplace(std::move(require_unchanged));
  return was_beside_;
}

}  // namespace tessera
