// What a job sends over the network: counted for the job and not for the process, because several
// may run at once.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

struct Traffic {
  std::uint64_t requests = 0, retries = 0, bytes_again = 0;  // as IoReport has them
};

// Counts what the thread that made it sends while it lives, and what threads send that work for
// this one (parallel_for). Those of one thread end in the opposite order of their beginnings; each
// counts what the inner ones count.
class TrafficCount {
 public:
  TrafficCount() noexcept;
  ~TrafficCount();
  TrafficCount(const TrafficCount&) = delete;
  TrafficCount& operator=(const TrafficCount&) = delete;

  [[nodiscard]] Traffic total() const noexcept;
  // To all counts under way on this thread.
  static void add(const Traffic& traffic) noexcept;

 private:
  std::atomic<std::uint64_t> requests_{0}, retries_{0}, bytes_again_{0};
  TrafficCount* const outer_;
};

}  // namespace tessera
