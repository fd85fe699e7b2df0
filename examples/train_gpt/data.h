// The text and the order in which training reads it.
//
// The windows of a step depend on (seed, step, index in the global batch) alone: not on the
// number of ranks, not on micro-batches, not on what came before. So a resumed run and a run on
// other ranks see the same data, and there is no reader state to save.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

class Text {
 public:
  // Throws `not_found` or `io` when the file cannot be read, `invalid_argument` when it is too
  // short for windows of `seq` + 1 bytes in both parts. The last twentieth is held out for
  // validation.
  Text(const std::string& path, std::int64_t seq, std::uint64_t seed);

  // seq + 1 bytes: the inputs are all but the last, the targets all but the first.
  using Window = std::span<const std::uint8_t>;
  [[nodiscard]] Window training(std::int64_t step, std::int64_t index) const;
  // Window `index` of `count` evenly spaced ones of the held-out part.
  [[nodiscard]] Window validation(std::int64_t index, std::int64_t count) const;

  [[nodiscard]] std::int64_t size() const { return static_cast<std::int64_t>(bytes_.size()); }

 private:
  [[nodiscard]] Window at(std::int64_t begin) const;

  std::vector<std::uint8_t> bytes_;
  std::int64_t window_;      // bytes of a window
  std::int64_t train_size_;  // bytes before the held-out part
  std::uint64_t seed_;
};

// The part [begin, end) of `count` things that falls to part `index` of `parts`: contiguous, sizes
// differ by at most one.
struct Share {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  [[nodiscard]] std::int64_t size() const { return end - begin; }
};
[[nodiscard]] Share share_of(std::int64_t count, std::int64_t index, std::int64_t parts);
