#include "comm/same_host/reduce.h"

#include <algorithm>
#include <array>
#include <string>
#include <type_traits>

#include "base/half.h"
#include "tessera/error.h"

namespace tessera::same_host {
namespace {

// Elements that are added up at a time, in a buffer that stays in the nearest cache.
constexpr std::size_t kBlock = 512;

template <typename T>
inline constexpr bool kShort = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

// In what a type is added up.
template <typename T>
using SumOf = std::conditional_t<kShort<T>, float, T>;

template <typename T>
T stored(SumOf<T> value) {
  if constexpr (kShort<T>) {
    return T::from(value);
  } else {
    return value;
  }
}

template <Reduction kReduction, typename T>
T combine(T a, T b) {
  if constexpr (kReduction == Reduction::minimum) {
    return a < b || a != a ? a : b;
  } else if constexpr (kReduction == Reduction::maximum) {
    return a > b || a != a ? a : b;
  } else if constexpr (std::is_integral_v<T>) {
    using Wrapping = std::make_unsigned_t<T>;
    return static_cast<T>(static_cast<Wrapping>(a) + static_cast<Wrapping>(b));
  } else {
    return a + b;
  }
}

// One block; `count` is a constant for all but the last, so that the loops become vector code.
template <typename T, Reduction kReduction>
inline __attribute__((always_inline)) void reduce_block(std::span<const std::byte* const> sources,
                                                        std::byte* out, std::size_t first,
                                                        std::size_t count) {
  using Sum = SumOf<T>;
  Sum sums[kBlock];
  const auto* own = reinterpret_cast<const T*>(sources[0]) + first;
  for (std::size_t i = 0; i < count; ++i) sums[i] = own[i];
  for (std::size_t rank = 1; rank < sources.size(); ++rank) {
    const auto* from = reinterpret_cast<const T*>(sources[rank]) + first;
    for (std::size_t i = 0; i < count; ++i)
      sums[i] = combine<kReduction>(sums[i], static_cast<Sum>(from[i]));
  }
  if constexpr (kReduction == Reduction::average) {
    const auto ranks = static_cast<Sum>(sources.size());
    for (std::size_t i = 0; i < count; ++i) sums[i] /= ranks;
  }
  auto* to = reinterpret_cast<T*>(out) + first;
  for (std::size_t i = 0; i < count; ++i) to[i] = stored<T>(sums[i]);
}

template <typename T, Reduction kReduction>
void reduce_all(std::span<const std::byte* const> sources, std::byte* out, std::size_t elements) {
  std::size_t first = 0;
  for (; first + kBlock <= elements; first += kBlock)
    reduce_block<T, kReduction>(sources, out, first, kBlock);
  reduce_block<T, kReduction>(sources, out, first, elements - first);
}

template <typename T>
void reduce_as(Reduction reduction, std::span<const std::byte* const> sources, std::byte* out,
               std::size_t elements) {
  switch (reduction) {
    case Reduction::sum:
      return reduce_all<T, Reduction::sum>(sources, out, elements);
    case Reduction::average:
      if constexpr (!std::is_integral_v<T>)
        return reduce_all<T, Reduction::average>(sources, out, elements);
      break;
    case Reduction::minimum:
      return reduce_all<T, Reduction::minimum>(sources, out, elements);
    case Reduction::maximum:
      return reduce_all<T, Reduction::maximum>(sources, out, elements);
  }
  throw Error(ErrorCode::unsupported, "integers have no average");
}

// Bytes 0 and 1: the sum of two could be a 2.
void reduce_bools(Reduction reduction, std::span<const std::byte* const> sources, std::byte* out,
                  std::size_t elements) {
  reduce_as<std::uint8_t>(reduction == Reduction::sum ? Reduction::maximum : reduction, sources,
                          out, elements);
}

struct Reducible {
  DType dtype;
  bool has_average;
  void (*reduce)(Reduction, std::span<const std::byte* const>, std::byte*, std::size_t);
};

constexpr std::array<Reducible, 10> kReducible{{{DType::float32, true, reduce_as<float>},
                                                {DType::float64, true, reduce_as<double>},
                                                {DType::float16, true, reduce_as<Half>},
                                                {DType::bfloat16, true, reduce_as<BFloat16>},
                                                {DType::int8, false, reduce_as<std::int8_t>},
                                                {DType::int16, false, reduce_as<std::int16_t>},
                                                {DType::int32, false, reduce_as<std::int32_t>},
                                                {DType::int64, false, reduce_as<std::int64_t>},
                                                {DType::uint8, false, reduce_as<std::uint8_t>},
                                                {DType::bool8, false, reduce_bools}}};

}  // namespace

bool can_reduce(DType dtype, Reduction reduction) noexcept {
  const auto* found = std::ranges::find(kReducible, dtype, &Reducible::dtype);
  if (found == kReducible.end()) return false;
  return found->has_average || reduction != Reduction::average;
}

void reduce(DType dtype, Reduction reduction, std::span<const std::byte* const> sources,
            std::byte* out, std::size_t elements) {
  const auto* found = std::ranges::find(kReducible, dtype, &Reducible::dtype);
  if (found == kReducible.end()) {
    throw Error(ErrorCode::unsupported,
                "tensors of " + std::string(to_string(dtype)) + " are not reduced");
  }
  found->reduce(reduction, sources, out, elements);
}

}  // namespace tessera::same_host
