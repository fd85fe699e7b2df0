// How many requests are in flight: fewer where the server is busy.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <random>

#include "base/parallel.h"

namespace tessera {

// The bound is halved when the server says that it is busy, down to 1, and grows by one when as
// many requests in a row as it allows have gone well, up to where it began.
class Limiter {
 public:
  explicit Limiter(int most) : most_(most), bound_(most) {}

  // A place among the requests in flight.
  class Place {
   public:
    explicit Place(Limiter& limiter) : limiter_(limiter), round_(limiter.enter()) {}
    ~Place() { limiter_.leave(); }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    void went_well() { limiter_.went_well(); }
    void was_busy() { limiter_.was_busy(round_); }

   private:
    Limiter& limiter_;
    std::uint64_t round_;  // how often the bound had been halved when the request began
  };

  [[nodiscard]] int bound() const {
    const std::lock_guard lock(mutex_);
    return bound_;
  }

 private:
  std::uint64_t enter() {
    std::unique_lock lock(mutex_);
    wait_for_change(changed_, lock, [this] { return in_flight_ < bound_; });
    ++in_flight_;
    return round_;
  }
  void leave() {
    {
      const std::lock_guard lock(mutex_);
      --in_flight_;
    }
    changed_.notify_one();
  }
  void went_well() {
    const std::lock_guard lock(mutex_);
    if (bound_ == most_ || ++well_ < bound_) return;
    ++bound_;
    well_ = 0;
    changed_.notify_one();  // besides the one that leave() calls
  }
  // Requests that were in flight together hear together that the server is busy: they count once.
  void was_busy(std::uint64_t round) {
    const std::lock_guard lock(mutex_);
    well_ = 0;
    if (round != round_) return;
    ++round_;
    if (bound_ > 1) bound_ /= 2;
  }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  const int most_;
  // Guarded by mutex_:
  int bound_;
  int in_flight_ = 0;
  int well_ = 0;  // requests since the bound was changed
  std::uint64_t round_ = 0;
};

// How long to wait before the next attempt.

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
