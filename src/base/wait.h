// A wait that programs built by GCC 12 can do on the libstdc++ of GCC 11: the wheel runs there.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

namespace tessera {

// std::condition_variable::wait, whose symbol is new in GCC 12. The waits with a deadline are not.
inline void wait_for_change(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
  (void)changed.wait_for(lock, std::chrono::hours(1));
}
template <typename Condition>
void wait_for_change(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                     const Condition& condition) {
  while (!condition()) wait_for_change(changed, lock);
}

}  // namespace tessera
