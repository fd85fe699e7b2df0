// Work on several threads.
#pragma once

#include <cstddef>
#include <functional>

namespace tessera {

class HeedStop;
class RecentBlocks;
class TrafficCount;

// What the work of a thread belongs to. Threads of parallel_for have that of its caller.
struct ThreadJob {
  const HeedStop* stop = nullptr;   // the innermost; null: none
  TrafficCount* traffic = nullptr;  // likewise
  RecentBlocks* blocks = nullptr;   // likewise
  bool is_settling = false;
};
[[nodiscard]] ThreadJob& thread_job() noexcept;

// The most threads that one call takes.
inline constexpr int kMostThreads = 1024;
// Throws `invalid_argument` for a number that a caller cannot mean: below 1 or above kMostThreads.
void require_threads(int threads);

// Calls work(i) for every i in [0, count) on up to `threads` threads, the calling one among them,
// and returns when all calls have. Where the system gives fewer threads, these do all of the work.
// Indices are handed out in ascending order. After a call throws no new index is handed out; the
// exception of the lowest index is rethrown.
void parallel_for(int threads, std::size_t count, const std::function<void(std::size_t)>& work);

}  // namespace tessera
