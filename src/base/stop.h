// Work that its caller may end early.
#pragma once

#include <chrono>
#include <stop_token>

#include "tessera/error.h"

namespace tessera {

[[noreturn]] inline void throw_cancelled() {
  throw Error(ErrorCode::cancelled, "the caller asked for the work to end");
}

// Throws `cancelled` once the caller has asked for an end.
inline void require_going_on(const std::stop_token& stop) {
  if (stop.stop_requested()) throw_cancelled();
}

// While it lives, requests over a network that this thread sends heed `stop`, to whom nobody hands
// it on. So do those of threads that work for this one (parallel_for). Those of one thread end in
// the opposite order of their beginnings; outer ones are heeded, too.
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

// While it lives, what this thread sends commits, finds out what became of a commit, or cleans up,
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

}  // namespace tessera
