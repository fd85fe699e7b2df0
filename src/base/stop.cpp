#include "base/stop.h"

#include <utility>

#include "base/parallel.h"

namespace tessera {

HeedStop::HeedStop(std::stop_token stop) noexcept
    : stop_(std::move(stop)), outer_(std::exchange(thread_job().stop, this)) {}

HeedStop::~HeedStop() {
  thread_job().stop = outer_;
}

bool HeedStop::is_requested() noexcept {
  for (const HeedStop* one = thread_job().stop; one != nullptr; one = one->outer_)
    if (one->stop_.stop_requested()) return true;
  return false;
}

Settling::Settling() noexcept : before_(std::exchange(thread_job().is_settling, true)) {}

Settling::~Settling() {
  thread_job().is_settling = before_;
}

bool Settling::is_under_way() noexcept {
  return thread_job().is_settling;
}

}  // namespace tessera
