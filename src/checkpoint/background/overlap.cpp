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

void OverlapChoice::note_last() {
  if (!watch_) return;
  if (const auto time = watch_->between()) taken_.at(was_beside_ ? 1 : 0).push_back(*time);
  watch_.reset();
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

bool OverlapChoice::is_beside_step() {
  if (how_ == Overlap::measured) {
    note_last();
    if (taken_[0].size() >= kMeasuredEach && taken_[1].size() >= kMeasuredEach) choose();
  }
  if (how_ != Overlap::measured) return how_ == Overlap::always;
  if (std::exchange(is_first_, false)) return false;
  was_beside_ = taken_[1].size() < taken_[0].size();
  watch_.emplace();
  return was_beside_;
}

}  // namespace tessera
