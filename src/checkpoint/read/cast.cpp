#include "checkpoint/read/cast.h"

#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/half.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Any byte but 0 is true: a C++ bool must not hold what another program left in a file.
struct Bool8 {
  std::uint8_t bits;
  operator std::uint8_t() const { return bits != 0 ? 1 : 0; }  // NOLINT
};

template <typename T>
constexpr bool kIs16Bit = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

// Of a float outside the range of 64 bits, and of NaN, the least number.
template <typename Float>
std::int64_t to_int64(Float from) {
  constexpr auto kLimit = static_cast<Float>(9223372036854775808.0);
  const bool fits = from > -kLimit && from < kLimit;
  return fits ? static_cast<std::int64_t>(from) : std::numeric_limits<std::int64_t>::min();
}

// C++'s own conversion, except where it is undefined: a float outside an integer's range wraps
// through 64 bits as torch's does on common hardware, and NaN becomes zero's bit pattern of that
// route.
template <typename To, typename From>
To convert(From from) {
  if constexpr (kIs16Bit<To>) {
    return To::from(static_cast<float>(from));
  } else if constexpr (kIs16Bit<From>) {
    return convert<To>(static_cast<float>(from));
  } else if constexpr (std::is_same_v<From, Bool8>) {
    return convert<To>(static_cast<std::uint8_t>(from));
  } else if constexpr (std::is_same_v<To, Bool8>) {
    return {static_cast<std::uint8_t>(from != From{})};
  } else if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>) {
    return static_cast<To>(to_int64(from));
  } else {
    return static_cast<To>(from);
  }
}

template <DType kType, typename T>
struct TypeOf {
  static constexpr DType kDType = kType;
  using Type = T;
};

using Types = std::tuple<TypeOf<DType::float32, float>, TypeOf<DType::float64, double>,
                         TypeOf<DType::float16, Half>, TypeOf<DType::bfloat16, BFloat16>,
                         TypeOf<DType::int64, std::int64_t>, TypeOf<DType::int32, std::int32_t>,
                         TypeOf<DType::int16, std::int16_t>, TypeOf<DType::int8, std::int8_t>,
                         TypeOf<DType::uint8, std::uint8_t>, TypeOf<DType::uint16, std::uint16_t>,
                         TypeOf<DType::uint32, std::uint32_t>, TypeOf<DType::uint64, std::uint64_t>,
                         TypeOf<DType::bool8, Bool8>>;

// Calls f with a value of the C++ type that stands for `dtype`; false when there is none.
template <typename F>
bool with_type(DType dtype, F&& f) {
  const auto try_one = [&]<typename Row>(Row) {
    if (Row::kDType != dtype) return false;
    f(typename Row::Type{});
    return true;
  };
  return std::apply([&](auto... rows) { return (try_one(rows) || ...); }, Types{});
}

template <typename From, typename To>
constexpr bool exceeds() {
  return std::cmp_less(std::numeric_limits<From>::min(), std::numeric_limits<To>::min()) ||
         std::cmp_greater(std::numeric_limits<From>::max(), std::numeric_limits<To>::max());
}

template <typename From, typename To>
constexpr bool wraps_between() {
  constexpr bool kFromInteger = std::is_integral_v<From>;
  if constexpr (std::is_same_v<From, To> ||
                !(std::is_integral_v<To> || std::is_same_v<To, Bool8>)) {
    return false;
  } else if constexpr (kFromInteger && std::is_integral_v<To>) {
    return exceeds<From, To>();
  } else {
    return !std::is_same_v<From, Bool8>;
  }
}

}  // namespace

bool can_cast(DType from, DType to) noexcept {
  const auto ignore = [](auto) {};
  return from == to || (with_type(from, ignore) && with_type(to, ignore));
}

bool can_wrap(DType from, DType to) noexcept {
  bool wraps = false;
  with_type(from, [&](auto from_tag) {
    with_type(to,
              [&](auto to_tag) { wraps = wraps_between<decltype(from_tag), decltype(to_tag)>(); });
  });
  return wraps;
}

void cast(DType from, const std::byte* in, DType to, std::byte* out, std::int64_t count) {
  if (from == to) {
    std::memcpy(out, in, static_cast<std::size_t>(count) * size_of(from));
    return;
  }
  if (!can_cast(from, to)) {
    throw Error(ErrorCode::unsupported, "no conversion from " + std::string(to_string(from)) +
                                            " to " + std::string(to_string(to)));
  }
  with_type(from, [&](auto from_tag) {
    with_type(to, [&](auto to_tag) {
      using From = decltype(from_tag);
      using To = decltype(to_tag);
      for (std::int64_t i = 0; i < count; ++i) {
        From value;
        std::memcpy(&value, in + static_cast<std::size_t>(i) * sizeof(From), sizeof value);
        const To result = convert<To>(value);
        std::memcpy(out + static_cast<std::size_t>(i) * sizeof(To), &result, sizeof result);
      }
    });
  });
}

}  // namespace tessera
