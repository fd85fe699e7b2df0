#include "base/traffic.h"

#include <utility>

namespace tessera {
namespace {

thread_local TrafficCount* current = nullptr;

}  // namespace

TrafficCount::TrafficCount() noexcept : outer_(std::exchange(current, this)) {}

TrafficCount::~TrafficCount() {
  current = outer_;
}

Traffic TrafficCount::total() const noexcept {
  return {requests_, retries_, bytes_again_};
}

void TrafficCount::add(const Traffic& traffic) noexcept {
  for (TrafficCount* count = current; count != nullptr; count = count->outer_) {
    count->requests_ += traffic.requests;
    count->retries_ += traffic.retries;
    count->bytes_again_ += traffic.bytes_again;
  }
}

TrafficCount::Joined::Joined(TrafficCount* count) noexcept
    : before_(std::exchange(current, count)) {}

TrafficCount::Joined::~Joined() {
  current = before_;
}

TrafficCount* TrafficCount::innermost() noexcept {
  return current;
}

}  // namespace tessera
