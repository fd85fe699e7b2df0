#include "base/stop.h"

#include <utility>

namespace tessera {
namespace {

thread_local const HeedStop* current = nullptr;
thread_local bool is_settling = false;

}  // namespace

HeedStop::HeedStop(std::stop_token stop) noexcept
    : stop_(std::move(stop)), outer_(std::exchange(current, this)) {}

HeedStop::~HeedStop() {
  current = outer_;
}

bool HeedStop::is_requested() noexcept {
  for (const HeedStop* one = current; one != nullptr; one = one->outer_)
    if (one->stop_.stop_requested()) return true;
  return false;
}

HeedStop::Joined::Joined(const HeedStop* innermost) noexcept
    : before_(std::exchange(current, innermost)) {}

HeedStop::Joined::~Joined() {
  current = before_;
}

const HeedStop* HeedStop::innermost() noexcept {
  return current;
}

Settling::Settling() noexcept : before_(std::exchange(is_settling, true)) {}

Settling::~Settling() {
  is_settling = before_;
}

bool Settling::is_under_way() noexcept {
  return is_settling;
}

}  // namespace tessera
