// Waiting for what another node has written to appear here (fault-rows F24).
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stop_token>
#include <thread>

#include "base/stop.h"

namespace tessera {

// Calls `look` until it returns true, six times within 1.55 seconds: behind each look the pause is
// twice as long. A network file system may list the files of other nodes late, while it opens them
// at once, or after a moment.
template <typename Look>
[[nodiscard]] bool look_again(const Look& look) {
  constexpr int kLooks = 6;
  std::chrono::milliseconds pause{50};
  for (int looks = 1; !look(); ++looks) {
    if (looks == kLooks) return false;
    std::this_thread::sleep_for(pause);
    pause *= 2;
  }
  return true;
}

// How long a rank waits for what it knows to be there. A client of a network file system may
// remember for a minute that something is not. Tests make it shorter.
inline std::atomic<std::chrono::milliseconds> visible_within{std::chrono::seconds(90)};

// Calls `look` until it returns true or `end` has come. Throws `cancelled` when asked to stop.
template <typename Look>
[[nodiscard]] bool look_until(std::chrono::steady_clock::time_point end,
                              const std::stop_token& stop, const Look& look) {
  constexpr std::chrono::milliseconds kLongestPause{500};
  for (std::chrono::milliseconds pause{25}; !look(); pause = std::min(pause * 2, kLongestPause)) {
    if (std::chrono::steady_clock::now() >= end) return false;
    require_going_on(stop);
    std::this_thread::sleep_for(pause);
  }
  return true;
}
template <typename Look>
[[nodiscard]] bool look_until_visible(const std::stop_token& stop, const Look& look) {
  return look_until(std::chrono::steady_clock::now() + visible_within.load(), stop, look);
}

}  // namespace tessera
