// How long to wait before the next attempt.
#pragma once

#include <algorithm>
#include <chrono>
#include <random>

namespace tessera {

// Bounds double from `first` up to 20 s. A pause is between half of its bound and all of it, by
// chance: clients that failed together come back apart.
class Backoff {
 public:
  explicit Backoff(std::chrono::milliseconds first)
      : bound_(first), random_(std::random_device()()) {}

  [[nodiscard]] std::chrono::milliseconds next() {
    using Count = std::chrono::milliseconds::rep;
    std::uniform_int_distribution<Count> pick(bound_.count() / 2, bound_.count());
    const std::chrono::milliseconds pause(pick(random_));
    bound_ = std::min(bound_ * 2, kLongest);
    return pause;
  }

  static constexpr std::chrono::milliseconds kLongest{20'000};

 private:
  std::chrono::milliseconds bound_;
  std::minstd_rand random_;
};

}  // namespace tessera
