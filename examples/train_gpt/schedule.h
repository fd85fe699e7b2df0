// The learning rate: linear warm-up to the peak, then a half cosine down to a tenth of it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numbers>

struct Schedule {
  double peak = 0;
  std::int64_t warmup = 0;  // steps
  std::int64_t steps = 0;   // of the whole training

  // For the step after `done` steps.
  [[nodiscard]] double at(std::int64_t done) const {
    if (done < warmup) return peak * static_cast<double>(done + 1) / static_cast<double>(warmup);
    const auto length = static_cast<double>(std::max<std::int64_t>(1, steps - warmup));
    const double part = std::min(1.0, static_cast<double>(done - warmup) / length);
    return peak * (0.1 + 0.9 * 0.5 * (1 + std::cos(std::numbers::pi * part)));
  }
};
