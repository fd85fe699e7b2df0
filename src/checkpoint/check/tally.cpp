#include "checkpoint/check/tally.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <utility>
#include <variant>

#include "base/numbers.h"
#include "checkpoint/check/block_sums.h"
#include "checkpoint/read/cast.h"

namespace tessera {
namespace {

// A table of all patterns is cleared and looked through, which takes as long as so many numbers.
constexpr std::uint64_t kFewNumbers = 1 << 16;
constexpr std::size_t kPairs = 1 << 16;  // patterns of two bytes

std::size_t biased_exponent(double number) {
  return std::bit_cast<std::uint64_t>(number) >> 52U & 0x7ffU;
}

// The squares of such numbers, and of those near them, are float64s with all of their digits.
bool has_squares(double magnitude) {
  return magnitude == 0 || (magnitude >= 0x1p-480 && magnitude <= 0x1p500);
}

double largest_magnitude(const BlockSums& sums) {
  return std::max(std::abs(sums.smallest), std::abs(sums.largest));
}

// The sums are of numbers that were divided by a power of two.
Moments moments_of(const BlockSums& sums, std::size_t count, int power) {
  const auto number = static_cast<long double>(count);
  const long double sum = sums.sum;
  const long double squares = std::max<long double>(0, sums.squares - sum * sum / number);
  return {count, std::ldexp(sums.first + sum / number, power), std::ldexp(squares, 2 * power)};
}

// Adds up blocks of float32, of float64, and of what becomes float64.
class BlockTally final : public PartTally {
 public:
  explicit BlockTally(DType dtype) : dtype_(dtype), size_(size_of(dtype)) {
    if (dtype == DType::float32) exponents_.emplace<ExponentCounts<float>>();
  }

  void add(std::span<const std::byte> numbers) override {
    while (!numbers.empty()) {
      const auto block = numbers.first(std::min(kSumBlock * size_, numbers.size()));
      if (dtype_ == DType::int64 || dtype_ == DType::uint64) add_bits(block);
      std::visit([&](auto& exponents) { add_block(block, exponents); }, exponents_);
      numbers = numbers.subspan(block.size());
    }
  }

  Moments finish(Counts& all) override {
    std::visit([&](auto& exponents) { collect(exponents); }, exponents_);
    all.add(counts_);
    counts_ = {};
    return std::exchange(moments_, {});
  }

 private:
  template <typename T>
  void add_block(std::span<const std::byte> bytes, ExponentCounts<T>& exponents) {
    constexpr bool kIsDouble = std::is_same_v<T, double>;
    std::array<T, kSumBlock> room;
    const std::size_t count = bytes.size() / size_;
    cast(dtype_, bytes.data(), kIsDouble ? DType::float64 : DType::float32,
         reinterpret_cast<std::byte*>(room.data()), static_cast<std::int64_t>(count));
    const std::span<const T> block(room.data(), count);
    const std::uint64_t below_before = exponents.of(0);
    const std::uint64_t odd_before = exponents.of(ExponentCounts<T>::kLast);
    exponents.add(block);
    const std::uint64_t below = exponents.of(0) - below_before;
    const auto zeros = below == 0 ? 0 : static_cast<std::uint64_t>(std::ranges::count(block, T{0}));
    counts_.zeros += zeros;
    if (kIsDouble) counts_.exponents[0] += below - zeros;
    const bool has_odd = exponents.of(ExponentCounts<T>::kLast) != odd_before;
    if (!has_odd && (kIsDouble || below == zeros)) {
      const BlockSums sums = sums_of(block);
      if (!kIsDouble || has_squares(largest_magnitude(sums))) return take(sums, count);
    }
    add_odd_block(block);
  }

  // What is not finite is counted, the rest is added up. Exponents of float32 do not tell those of
  // its subnormal numbers.
  template <typename T>
  void add_odd_block(std::span<const T> block) {
    std::array<double, kSumBlock> room;
    std::size_t count = 0;
    for (const T given : block) {
      const auto number = static_cast<double>(given);
      if (!std::isfinite(number)) {
        counts_.add(number, 1);
        continue;
      }
      if (!std::is_same_v<T, double> && number != 0 && std::abs(number) < 0x1p-126)
        ++counts_.exponents[biased_exponent(number)];
      room[count++] = number;
    }
    if (count == 0) return;
    const std::span<double> numbers(room.data(), count);
    const BlockSums sums = sums_of(numbers);
    const double magnitude = largest_magnitude(sums);
    if (has_squares(magnitude)) return take(sums, count);
    const int power = std::ilogb(magnitude);
    for (double& number : numbers) number = std::ldexp(number, -power);
    note_ends(sums);
    moments_.add(moments_of(sums_of(numbers), count, power));
  }

  void take(const BlockSums& sums, std::size_t count) {
    note_ends(sums);
    moments_.add(moments_of(sums, count, 0));
  }

  void note_ends(const BlockSums& sums) {
    counts_.smallest = std::min(counts_.smallest, sums.smallest);
    counts_.largest = std::max(counts_.largest, sums.largest);
  }

  void add_bits(std::span<const std::byte> block) {
    for (std::size_t at = 0; at < block.size(); at += sizeof(std::uint64_t)) {
      const auto bits = load_le<std::uint64_t>(block.data() + at);
      const std::uint64_t ordered = dtype_ == DType::int64 ? ordered_bits(bits) : bits;
      counts_.smallest_bits = std::min(counts_.smallest_bits, ordered);
      counts_.largest_bits = std::max(counts_.largest_bits, ordered);
    }
  }

  // Zeros, subnormal numbers and what is not finite were counted by themselves.
  template <typename T>
  void collect(ExponentCounts<T>& exponents) {
    constexpr std::size_t kBias = ExponentCounts<T>::kLast / 2;
    for (std::size_t e = 1; e < ExponentCounts<T>::kLast; ++e)
      counts_.exponents[e + Counts::kBias - kBias] += exponents.of(e);
    exponents = {};
  }

  DType dtype_;
  std::size_t size_;  // bytes of a number
  std::variant<ExponentCounts<double>, ExponentCounts<float>> exponents_;
  Counts counts_;
  Moments moments_;
};

// Counts patterns: of two bytes those of the type, or those of two neighbours of one byte.
class PatternTally final : public PartTally {
 public:
  PatternTally(DType dtype, std::span<const double> values)
      : size_(size_of(dtype)), values_(values), pairs_(size_ == 2 ? kPairs : 0) {}

  void add(std::span<const std::byte> numbers) override {
    if (size_ == 1 && pairs_.empty() && numbers.size() >= kFewNumbers) pairs_.resize(kPairs);
    if (!pairs_.empty()) {
      const auto pairs = numbers.first(numbers.size() / 2 * 2);
      count_patterns(pairs, pairs_.data());
      numbers = numbers.subspan(pairs.size());
    }
    for (const std::byte byte : numbers) ++bytes_[std::to_integer<std::size_t>(byte)];
  }

  Moments finish(Counts& all) override {
    all.patterns.resize(values_.size());
    if (size_ == 2) {
      for (std::size_t pair = 0; pair < pairs_.size(); ++pair) note(all, pair, pairs_[pair]);
    } else {
      for (std::size_t pair = 0; pair < pairs_.size(); ++pair) {
        bytes_[pair & 0xffU] += pairs_[pair];
        bytes_[pair >> 8U] += pairs_[pair];
      }
      for (std::size_t byte = 0; byte < bytes_.size(); ++byte) note_byte(all, byte, bytes_[byte]);
    }
    std::ranges::fill(pairs_, 0);
    bytes_ = {};
    return {};
  }

 private:
  void note(Counts& all, std::size_t pattern, std::uint64_t times) const {
    if (times == 0) return;
    all.patterns[pattern] += times;
    if (!std::isfinite(values_[pattern])) all.add(values_[pattern], times);
  }
  void note_byte(Counts& all, std::size_t byte, std::uint64_t times) const {
    if (values_.size() == kFloat4Values.size()) {
      note(all, byte & 0xfU, times);
      note(all, byte >> 4U, times);
    } else {
      note(all, byte, times);
    }
  }

  std::size_t size_;                        // bytes of a number
  std::span<const double> values_;          // by pattern
  std::vector<std::uint32_t> pairs_;        // by pattern; empty: there are too few bytes
  std::array<std::uint64_t, 256> bytes_{};  // by byte, of those that are not in pairs
};

}  // namespace

NumberForm form_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::complex32:
      return {DType::float16, 2};
    case DType::complex64:
      return {DType::float32, 2};
    case DType::complex128:
      return {DType::float64, 2};
    default:
      return {dtype, 1};
  }
}

void Moments::add(const Moments& next) {
  if (next.count == 0) return;
  const auto here = static_cast<long double>(count);
  const auto there = static_cast<long double>(next.count);
  const long double difference = next.mean - mean;
  const long double share = there / (here + there);
  mean = count == 0 ? next.mean : mean + difference * share;
  squares += next.squares + (count == 0 ? 0 : difference * difference * here * share);
  count += next.count;
}

void Counts::add(const Counts& more) {
  nans += more.nans;
  positive_infinities += more.positive_infinities;
  negative_infinities += more.negative_infinities;
  zeros += more.zeros;
  smallest = std::min(smallest, more.smallest);
  largest = std::max(largest, more.largest);
  smallest_bits = std::min(smallest_bits, more.smallest_bits);
  largest_bits = std::max(largest_bits, more.largest_bits);
  for (std::size_t e = 0; e < kExponents; ++e) exponents[e] += more.exponents[e];
}

void Counts::add(double number, std::uint64_t times) {
  if (std::isnan(number)) {
    nans += times;
  } else if (std::isinf(number)) {
    (number > 0 ? positive_infinities : negative_infinities) += times;
  } else {
    smallest = std::min(smallest, number);
    largest = std::max(largest, number);
    (number == 0 ? zeros : exponents[biased_exponent(number)]) += times;
  }
}

bool is_counted_by_patterns(DType dtype, std::uint64_t numbers) noexcept {
  return size_of(dtype) == 1 || (size_of(dtype) == 2 && numbers > kFewNumbers);
}

std::vector<double> pattern_values(DType dtype) {
  if (dtype == DType::float4_e2m1fn_x2) return {kFloat4Values.begin(), kFloat4Values.end()};
  if (is_small_float(dtype)) {
    const std::array<float, 256> values = float8_values(dtype);
    return {values.begin(), values.end()};
  }
  std::vector<double> values(std::size_t{1} << 8 * size_of(dtype));
  std::vector<std::byte> patterns(values.size() * size_of(dtype));
  for (std::size_t i = 0; i < values.size(); ++i)
    std::memcpy(&patterns[i * size_of(dtype)], &i, size_of(dtype));
  cast(dtype, patterns.data(), DType::float64, reinterpret_cast<std::byte*>(values.data()),
       static_cast<std::int64_t>(values.size()));
  return values;
}

std::unique_ptr<PartTally> make_tally(DType dtype, std::span<const double> values) {
  if (values.empty()) return std::make_unique<BlockTally>(dtype);
  return std::make_unique<PatternTally>(dtype, values);
}

Moments resolve_patterns(Counts& counts, std::span<const double> values) {
  Moments moments;
  long double sum = 0;
  const auto each = [&](const auto& visit) {
    for (std::size_t i = 0; i < counts.patterns.size(); ++i) {
      if (counts.patterns[i] != 0 && std::isfinite(values[i])) visit(values[i], counts.patterns[i]);
    }
  };
  each([&](double value, std::uint64_t times) {
    counts.add(value, times);
    moments.count += times;
    sum += static_cast<long double>(value) * static_cast<long double>(times);
  });
  if (moments.count == 0) return moments;
  moments.mean = sum / static_cast<long double>(moments.count);
  each([&](double value, std::uint64_t times) {
    const long double difference = value - moments.mean;
    moments.squares += difference * difference * static_cast<long double>(times);
  });
  return moments;
}

std::optional<std::size_t> first_not_finite(DType dtype, std::span<const std::byte> numbers) {
  const std::size_t size = size_of(dtype);
  const std::vector<double> values = size == 1 ? pattern_values(dtype) : std::vector<double>();
  for (std::size_t at = 0; at < numbers.size(); at += size) {
    double number = 0;
    if (size == 1) {
      number = values[std::to_integer<std::size_t>(numbers[at])];
    } else {
      cast(dtype, &numbers[at], DType::float64, reinterpret_cast<std::byte*>(&number), 1);
    }
    if (!std::isfinite(number)) return at / size;
  }
  return std::nullopt;
}

}  // namespace tessera
