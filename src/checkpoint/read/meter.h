// Counts the bytes of long work, tells a progress hook now and then, and ends it when asked to.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <stop_token>

#include "base/stop.h"
#include "tessera/checkpoint.h"

namespace tessera {

class Meter {
 public:
  Meter(ProgressHook hook, std::uint64_t total, std::stop_token stop = {})
      : hook_(std::move(hook)), total_(total), stop_(std::move(stop)) {}

  // From any thread. Throws `cancelled` once the work is to end.
  void add(std::uint64_t bytes) {
    require_going_on(stop_);
    done_ += bytes;
    if (!hook_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto now = std::chrono::steady_clock::now();
    if (!lock || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    hook_({done_.load(), total_});
  }

  // The last word: everything is done.
  void finish() {
    if (hook_) hook_({total_, total_});
  }

  [[nodiscard]] const std::stop_token& stop() const { return stop_; }

 private:
  ProgressHook hook_;
  std::uint64_t total_;
  std::stop_token stop_;
  std::atomic<std::uint64_t> done_{0};
  std::mutex mutex_;
  std::chrono::steady_clock::time_point last_{};  // guarded by mutex_
};

// Bytes of all tensors of these leaves.
[[nodiscard]] inline std::uint64_t tensor_bytes(const std::vector<Leaf>& leaves) {
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : leaves) {
    if (!leaf.value.is(Value::Kind::tensor)) continue;
    const Tensor& tensor = leaf.value.as_tensor();
    bytes += byte_size(tensor.dtype, tensor.shape);
  }
  return bytes;
}

}  // namespace tessera
