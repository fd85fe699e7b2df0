#include "base/traffic.h"

#include <utility>

#include "base/parallel.h"

namespace tessera {

TrafficCount::TrafficCount() noexcept : outer_(std::exchange(thread_job().traffic, this)) {}

TrafficCount::~TrafficCount() {
  thread_job().traffic = outer_;
}

Traffic TrafficCount::total() const noexcept {
  return {requests_, retries_, bytes_again_};
}

void TrafficCount::add(const Traffic& traffic) noexcept {
  for (TrafficCount* count = thread_job().traffic; count != nullptr; count = count->outer_) {
    count->requests_ += traffic.requests;
    count->retries_ += traffic.retries;
    count->bytes_again_ += traffic.bytes_again;
  }
}

}  // namespace tessera
