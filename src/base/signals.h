// Signals that are noted in place of ending the process.
#pragma once

#include <chrono>
#include <optional>

#include "base/process.h"

namespace tessera {

// While one lives, its signal is noted in this process. A handler that the program had is called,
// too. A child of fork() ends by the signal as by default. Any thread may make one; the last one of
// a signal gives it back, unless somebody has handled it otherwise meanwhile. Making another one
// takes it again.
class NotedSignal {
 public:
  // Throws `invalid_argument` for what is no signal or cannot be handled.
  explicit NotedSignal(int signal);
  ~NotedSignal();
  NotedSignal(const NotedSignal&) = delete;
  NotedSignal& operator=(const NotedSignal&) = delete;

  // When it came first. None: it has not.
  [[nodiscard]] std::optional<std::chrono::steady_clock::time_point> came() const noexcept;

 private:
  const int signal_;
  const MadeHere made_here_;
};

}  // namespace tessera
