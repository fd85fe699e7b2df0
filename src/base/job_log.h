// Tells an EventHook how the phases of a job went.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "tessera/error.h"
#include "tessera/job.h"

namespace tessera {

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

}  // namespace tessera
