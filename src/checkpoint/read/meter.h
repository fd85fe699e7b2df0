// Counts the bytes of long work, tells a progress hook now and then, and ends it when asked to.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stop_token>
#include <vector>

#include "base/parallel.h"
#include "checkpoint/read/reader_source.h"
#include "tessera/checkpoint.h"
#include "tessera/leaf.h"

namespace tessera {

class Meter {
 public:
  Meter(ProgressHook hook, std::uint64_t total, std::stop_token stop = {})
      : hook_(std::move(hook)), total_(total), stop_(std::move(stop)) {}

  // From any thread. Throws `cancelled` once the work is to end. What files have besides tensors
  // may be among the bytes: the hook hears of no more than all.
  void add(std::uint64_t bytes) {
    require_going_on(stop_);
    done_ += bytes;
    if (!hook_) return;
    const std::unique_lock lock(mutex_, std::try_to_lock);
    const auto now = std::chrono::steady_clock::now();
    if (!lock || now - last_ < std::chrono::milliseconds(100)) return;
    last_ = now;
    hook_({total_ == 0 ? done_.load() : std::min(done_.load(), total_), total_});
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

// How much memory each thread of a job may take.

// The memory that each of the working threads may take: a window and a tile of its own, and one
// request's bytes (kSpanBytes) besides.
struct Buffers {
  std::size_t window;
  std::size_t tile;
};

// The cost of a request for a tensor's bytes, in bytes that it could have read. Opens the file of
// its first piece that is in one.
[[nodiscard]] inline std::uint64_t request_cost_of(const Tensor& tensor) {
  for (const Piece& piece : tensor.pieces)
    if (piece.storage && piece.storage->source) return piece.storage->source->request_cost();
  return kNearRequest;
}
[[nodiscard]] inline std::uint64_t request_cost_of(const std::vector<Leaf>& leaves) {
  for (const Leaf& leaf : leaves)
    if (leaf.value.is(Value::Kind::tensor)) return request_cost_of(leaf.value.as_tensor());
  return kNearRequest;
}

// A window is larger where requests cost more.
[[nodiscard]] inline Buffers buffers_for(std::uint64_t memory, std::uint64_t workers,
                                         std::uint64_t request_cost = kNearRequest) {
  constexpr std::uint64_t kLeast = 64 << 10;
  const std::uint64_t largest_window = std::max<std::uint64_t>(1 << 20, 16 * request_cost);
  constexpr std::uint64_t kLargestTile = 1 << 30;
  const std::uint64_t share = memory / std::max<std::uint64_t>(workers, 1);
  const std::uint64_t window = std::clamp(share / 2, kLeast, largest_window);
  const std::uint64_t besides = window + static_cast<std::uint64_t>(kSpanBytes);
  const std::uint64_t tile = std::max(share / 2, share - std::min(share, besides));
  return {static_cast<std::size_t>(window),
          static_cast<std::size_t>(std::clamp(tile, kLeast, kLargestTile))};
}

}  // namespace tessera
