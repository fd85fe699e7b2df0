// Work on several threads, work that its caller may end early, and waiting.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <stop_token>
#include <thread>

#include "tessera/error.h"

namespace tessera {

// Work on several threads.

class BackgroundWriter;
class HeedStop;
class RecentBlocks;
class TrafficCount;

// The job that the work of a thread belongs to. Threads of parallel_for have that of its caller.
struct ThreadJob {
  const HeedStop* stop = nullptr;   // the innermost; null: none
  TrafficCount* traffic = nullptr;  // likewise
  RecentBlocks* blocks = nullptr;   // likewise
  bool is_settling = false;
  const BackgroundWriter* behind = nullptr;  // whose save it is: it waits for no such save
  bool is_copying = false;                   // it makes a copy (copies.h), and waits for none
};
[[nodiscard]] ThreadJob& thread_job() noexcept;

// The most threads that one call takes.
inline constexpr int kMostThreads = 1024;
// Throws `invalid_argument` for a number that a caller cannot mean: below 1 or above kMostThreads.
void require_threads(int threads);

// Calls work(i) for every i in [0, count) on up to `threads` threads, the calling one among them,
// and returns when all calls have. Fewer threads do all of the work if the system gives no more.
// Indices are handed out in ascending order. After a call throws no new index is handed out;
// the exception of the lowest index is rethrown.
void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& work);

// Work that its caller may end early.

[[noreturn]] inline void throw_cancelled() {
  throw Error(ErrorCode::cancelled, "the caller asked for the work to end");
}

// Throws `cancelled` once the caller has asked for an end.
inline void require_going_on(const std::stop_token& stop) {
  if (stop.stop_requested()) throw_cancelled();
}

// Requests over a network that this thread sends while it lives heed `stop`, though nobody hands it
// on to them. So do those of threads that work for this one (parallel_for). Those of one thread end
// in the opposite order of their beginnings; outer ones are heeded, too.
class HeedStop {
 public:
  explicit HeedStop(std::stop_token stop) noexcept;
  ~HeedStop();
  HeedStop(const HeedStop&) = delete;
  HeedStop& operator=(const HeedStop&) = delete;

  [[nodiscard]] static bool is_requested() noexcept;

 private:
  const std::stop_token stop_;
  const HeedStop* const outer_;
};

// What this thread sends while it lives commits, finds out what became of a commit, or cleans up,
// as does what threads send that work for it: a stop does not cut it. It ends soon then, since
// nothing is tried twice.
class Settling {
 public:
  // How long one request may go on after the stop.
  static constexpr std::chrono::milliseconds kWithin{5'000};

  Settling() noexcept;
  ~Settling();
  Settling(const Settling&) = delete;
  Settling& operator=(const Settling&) = delete;

  [[nodiscard]] static bool is_under_way() noexcept;

 private:
  const bool before_;
};

// A wait that programs built by GCC 12 can do on the libstdc++ of GCC 11: the wheel runs there.

// std::condition_variable::wait, whose symbol is new in GCC 12. The waits with a deadline are not.
inline void wait_for_change(std::condition_variable& changed, std::unique_lock<std::mutex>& lock) {
  (void)changed.wait_for(lock, std::chrono::hours(1));
}
template <typename Condition>
void wait_for_change(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                     const Condition& condition) {
  while (!condition()) wait_for_change(changed, lock);
}

// What one thread decides once, and any may wait for.
class Decision {
 public:
  void make();
  [[nodiscard]] bool is_made() const noexcept { return is_made_; }
  void wait() const;
  // Returns whether it is made. Not for longer than years: the clock overflows.
  [[nodiscard]] bool wait_for(std::chrono::milliseconds time) const;

 private:
  std::atomic<bool> is_made_ = false;  // changes under mutex_
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
};

// Waiting for what another node has written to appear here (fault-rows F24).

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
