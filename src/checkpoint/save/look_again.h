// Waiting for what another node has written to appear here.
#pragma once

#include <chrono>
#include <thread>

namespace tessera {

// Calls `look` until it returns true, six times within 1.55 seconds: behind each look the pause is
// twice as long. A network file system may list the files of other nodes late, while it opens them
// at once, or after a moment (fault-rows F24).
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

}  // namespace tessera
