#include "checkpoint/check/block_sums.h"

#include <algorithm>
#include <cstring>

#include "base/numbers.h"

namespace tessera {
namespace {

// Four at a time, on every processor. They are converted to float64 before they are added.
using Four [[gnu::vector_size(32)]] = double;
using FourFloats [[gnu::vector_size(16)]] = float;

template <typename T>
struct VectorOf;
template <>
struct VectorOf<float> {
  using Type = FourFloats;
};
template <>
struct VectorOf<double> {
  using Type = Four;
};

// Two independent sums, so that an addition need not wait for the one before it.
constexpr std::size_t kLanes = 4;
constexpr std::size_t kTogether = 2 * kLanes;

template <typename T>
[[gnu::always_inline]] inline BlockSums sums_in_lanes(const T* numbers, std::size_t count) {
  using Numbers = typename VectorOf<T>::Type;
  const T first = numbers[0];
  const auto origin = static_cast<double>(first);
  Numbers least[2], most[2];
  Four sum[2], squares[2];
  for (int half = 0; half < 2; ++half) {
    least[half] = most[half] = Numbers{} + first;
    sum[half] = squares[half] = Four{};
  }
  const auto take = [&](const T* at) __attribute__((always_inline)) {
    for (int half = 0; half < 2; ++half) {
      Numbers values;
      std::memcpy(&values, at + half * static_cast<int>(kLanes), sizeof values);
      const Four difference = __builtin_convertvector(values, Four) - origin;
      sum[half] += difference;
      squares[half] += difference * difference;
      least[half] = values < least[half] ? values : least[half];
      most[half] = values > most[half] ? values : most[half];
    }
  };
  const std::size_t whole = count / kTogether * kTogether;
  for (std::size_t i = 0; i < whole; i += kTogether) take(numbers + i);
  if (whole < count) {
    T rest[kTogether];
    std::fill_n(rest, kTogether, first);  // adds nothing
    std::copy(numbers + whole, numbers + count, rest);
    take(rest);
  }
  BlockSums made{origin, origin, origin, 0, 0};
  for (int half = 0; half < 2; ++half) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) {
      made.smallest = std::min(made.smallest, static_cast<double>(least[half][lane]));
      made.largest = std::max(made.largest, static_cast<double>(most[half][lane]));
      made.sum += sum[half][lane];
      made.squares += squares[half][lane];
    }
  }
  return made;
}

#if defined(__x86_64__)

template <typename T>
[[gnu::target("avx2")]] BlockSums sums_by_avx2(const T* numbers, std::size_t count) {
  return sums_in_lanes(numbers, count);
}

template <typename T>
BlockSums sums_of_numbers(std::span<const T> numbers) {
  return __builtin_cpu_supports("avx2") != 0 ? sums_by_avx2(numbers.data(), numbers.size())
                                             : sums_in_lanes(numbers.data(), numbers.size());
}

#else

template <typename T>
BlockSums sums_of_numbers(std::span<const T> numbers) {
  return sums_in_lanes(numbers.data(), numbers.size());
}

#endif

template <typename T>
std::size_t exponent_of(const T& number) {
  if constexpr (sizeof(T) == 4) {
    return std::bit_cast<std::uint32_t>(number) >> 23U & 0xffU;
  } else {
    return std::bit_cast<std::uint64_t>(number) >> 52U & 0x7ffU;
  }
}

}  // namespace

BlockSums sums_of(std::span<const float> numbers) noexcept {
  return sums_of_numbers(numbers);
}
BlockSums sums_of(std::span<const double> numbers) noexcept {
  return sums_of_numbers(numbers);
}

template <typename T>
void ExponentCounts<T>::add(std::span<const T> numbers) noexcept {
  std::uint32_t* const counts = counts_.data();
  const T* at = numbers.data();
  std::size_t left = numbers.size();
  for (; left >= kTables; left -= kTables, at += kTables) {
    ++counts[exponent_of(at[0])];
    ++counts[kExponents + exponent_of(at[1])];
    ++counts[2 * kExponents + exponent_of(at[2])];
    ++counts[3 * kExponents + exponent_of(at[3])];
  }
  for (; left > 0; --left) ++counts[exponent_of(*at++)];
}

template <typename T>
std::uint64_t ExponentCounts<T>::of(std::size_t exponent) const noexcept {
  std::uint64_t count = 0;
  for (std::size_t table = 0; table < kTables; ++table)
    count += counts_[table * kExponents + exponent];
  return count;
}

template class ExponentCounts<float>;
template class ExponentCounts<double>;

void count_patterns(std::span<const std::byte> pairs, std::uint32_t* counts) noexcept {
  constexpr std::size_t kWord = 8;
  const auto add = [counts](std::uint64_t word, std::uint32_t times) {
    counts[word & 0xffffU] += times;
    counts[word >> 16U & 0xffffU] += times;
    counts[word >> 32U & 0xffffU] += times;
    counts[word >> 48U] += times;
  };
  const std::size_t words = pairs.size() / kWord;
  if (words > 0) {
    auto last = load_le<std::uint64_t>(pairs.data());
    std::uint32_t times = 0;
    for (std::size_t i = 0; i < words; ++i) {
      const auto word = load_le<std::uint64_t>(pairs.data() + i * kWord);
      if (word != last) {
        add(last, times);
        last = word;
        times = 0;
      }
      ++times;
    }
    add(last, times);
  }
  for (std::size_t at = words * kWord; at + 2 <= pairs.size(); at += 2)
    ++counts[load_le<std::uint16_t>(pairs.data() + at)];
}

}  // namespace tessera
