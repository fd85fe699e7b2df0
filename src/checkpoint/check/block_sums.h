// The inner loops of statistics: sums and exponents of numbers that lie one behind the other.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

// Sums go over so many numbers before they are combined: their rounding does not grow with the
// tensor, and the numbers are in the nearest cache.
inline constexpr std::size_t kSumBlock = 4096;

// Of numbers that are all finite. Differences are from the first of them, which keeps the digits of
// a small deviation around a large mean.
struct BlockSums {
  double smallest = 0;
  double largest = 0;
  double first = 0;
  double sum = 0;      // of the differences
  double squares = 0;  // of the differences
};
// The numbers must be at least one. The order of additions is the same on every processor.
[[nodiscard]] BlockSums sums_of(std::span<const float> numbers) noexcept;
[[nodiscard]] BlockSums sums_of(std::span<const double> numbers) noexcept;

// How often each exponent occurs among numbers of type T, as its bits have it: 0 stands for zeros
// and subnormal numbers, the last one for what is not finite. At most 2^32 numbers may be counted.
template <typename T>
class ExponentCounts {
 public:
  static constexpr std::size_t kExponents = sizeof(T) == 4 ? 256 : 2048;
  static constexpr std::uint64_t kLast = kExponents - 1;

  ExponentCounts() : counts_(kTables * kExponents) {}
  void add(std::span<const T> numbers) noexcept;
  [[nodiscard]] std::uint64_t of(std::size_t exponent) const noexcept;

 private:
  // Numbers that follow each other are counted apart: an addition to what was just stored waits.
  static constexpr std::size_t kTables = 4;
  std::vector<std::uint32_t> counts_;
};

// Adds how often each pattern of 16 bits occurs to `counts`, which are 65,536. Runs of one pattern,
// as of zeros, are counted at once.
void count_patterns(std::span<const std::byte> pairs, std::uint32_t* counts) noexcept;

}  // namespace tessera
