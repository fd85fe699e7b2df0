// Counts and sums of a tensor's numbers, made in parts by several threads and put together.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// What the elements of a type are made of: numbers of a type.
struct NumberForm {
  DType dtype;              // of the numbers: float32 for complex64
  std::size_t per_element;  // values that a piece of memory of this type has: 2 of complex ones
};
[[nodiscard]] NumberForm form_of(DType dtype) noexcept;

// The mean of some numbers and their squared differences from it. Wider than float64, so that the
// squares of its largest numbers have a place.
struct Moments {
  std::uint64_t count = 0;
  long double mean = 0;
  long double squares = 0;

  void add(const Moments& next);
};

// What may be put together in any order: all but the moments.
struct Counts {
  // The exponents of float64, as its bits have them.
  static constexpr std::size_t kExponents = 2048;
  static constexpr int kBias = 1023;

  std::uint64_t nans = 0;
  std::uint64_t positive_infinities = 0;
  std::uint64_t negative_infinities = 0;
  std::uint64_t zeros = 0;
  // Of finite numbers.
  double smallest = std::numeric_limits<double>::infinity();
  double largest = -std::numeric_limits<double>::infinity();
  // Of integers of 64 bits, which a double may not hold; those with a sign by ordered_bits.
  std::uint64_t smallest_bits = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t largest_bits = 0;
  std::vector<std::uint64_t> exponents = std::vector<std::uint64_t>(kExponents);  // not of zeros
  std::vector<std::uint64_t> patterns = {};  // how often each occurs; empty: they are not counted

  void add(const Counts& more);
  void add(double number, std::uint64_t times);  // all but the pattern
  [[nodiscard]] std::uint64_t not_finite() const noexcept {
    return nans + positive_infinities + negative_infinities;
  }
};

// Bits of int64 that are ordered as unsigned ones; twice gives them back.
[[nodiscard]] constexpr std::uint64_t ordered_bits(std::uint64_t bits) noexcept {
  return bits ^ std::uint64_t{1} << 63U;
}

// Takes the numbers of one part of a tensor after another. Belongs to one thread.
class PartTally {
 public:
  virtual ~PartTally() = default;
  // From front to back. All calls of a part but the last bring a multiple of kSumBlock numbers.
  virtual void add(std::span<const std::byte> numbers) = 0;
  // Ends the part: adds what was counted to `all`, and returns the rest.
  [[nodiscard]] virtual Moments finish(Counts& all) = 0;
};

// The numbers that the patterns of bits of a type of one or two bytes stand for, by the pattern; of
// float4_e2m1fn_x2 by those of its nibbles.
[[nodiscard]] std::vector<double> pattern_values(DType dtype);
// Whether so many numbers are counted by their patterns: it pays for many, and for those of a byte.
[[nodiscard]] bool is_counted_by_patterns(DType dtype, std::uint64_t numbers) noexcept;

// By patterns where `values`, those of pattern_values, are not empty; they must outlive it.
[[nodiscard]] std::unique_ptr<PartTally> make_tally(DType dtype, std::span<const double> values);

// What the patterns in `counts` stand for is added to them, but for what is not finite: that was
// counted before.
[[nodiscard]] Moments resolve_patterns(Counts& counts, std::span<const double> values);

// The position of the first number that is not finite.
[[nodiscard]] std::optional<std::size_t> first_not_finite(DType dtype,
                                                          std::span<const std::byte> numbers);

}  // namespace tessera
