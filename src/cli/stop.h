// Signals that ask a command to end, for commands that must not leave half of their work.
#pragma once

#include <atomic>
#include <stop_token>
#include <string>
#include <thread>

#include "base/process.h"

namespace tessera::cli {

// The first SIGINT, SIGTERM or SIGHUP while it lives requests a stop, and a second one ends the
// process at once. A signal that was ignored when the program began (nohup) stays ignored. To be
// made by the main thread before it starts others: they inherit that the signals are blocked. They
// stay so after its end: whoever has done its work exits with what that came to, not by a signal.
class StopOnSignal {
 public:
  StopOnSignal();
  ~StopOnSignal();
  StopOnSignal(const StopOnSignal&) = delete;
  StopOnSignal& operator=(const StopOnSignal&) = delete;

  [[nodiscard]] std::stop_token token() const { return source_.get_token(); }
  // Ends the process as the signal that asked for the stop would have, for whoever waits for it (a
  // shell's loop, 128 + signal), and says before what of the work is left. Returns when none did.
  void end_by_signal(const std::string& left) const;

 private:
  void watch();

  std::stop_source source_;
  std::atomic<int> signal_{0};  // the first one
  Fd signals_;
  Fd wake_;  // ends the watching
  std::thread watcher_;
};

}  // namespace tessera::cli
