// How the library says what it does: messages, phases of a job, what it sends over the network.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/error.h"
#include "tessera/job.h"
#include "tessera/library.h"

namespace tessera {

// How the library says what tessera/library.h hands to the program.

// Logs a message that concerns this process: a file, a rank.
void log(LogLevel level, std::string_view message);

// Logs a message that every rank says alike. Only where no hook is set does it matter: rank 0 alone
// writes it.
void log_of_all(LogLevel level, std::string_view message);

// Tells an EventHook how the phases of a job went.

class JobLog {
 public:
  // `hook` may be empty. `job` and `checkpoint` are as in Event.
  JobLog(EventHook hook, std::string_view job, int rank, std::string checkpoint);

  // Runs `work`, which returns how many bytes it dealt with, and tells the hook how it went. Phases
  // may lie in one another; the inner one is told first. Returns the bytes.
  std::uint64_t phase(std::string_view name, const std::function<std::uint64_t()>& work) const;

 private:
  void tell(Event& event, std::chrono::steady_clock::time_point begin) const;

  EventHook hook_;
  std::string_view job_;
  int rank_;
  std::string checkpoint_;
  std::uint64_t id_;
};

// The requests that a job sends over the network: counted for the job and not for the process,
// because several may run at once.

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
