#include "checkpoint/read/cast.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>

#include "base/numbers.h"
#include "tessera/error.h"

namespace tessera {

void require_castable(DType have, DType want, bool allow_cast, bool allow_wrap) {
  if (have == want) return;
  const std::string both =
      std::string(to_string(have)) + ", wanted " + std::string(to_string(want));
  if (!allow_cast) throw Error(ErrorCode::mismatch, "the checkpoint's dtype is " + both);
  if (!can_cast(have, want)) {
    throw Error(ErrorCode::unsupported,
                "no conversion between these: the checkpoint's dtype is " + both);
  }
  if (can_wrap(have, want) && !allow_wrap) {
    throw Error(ErrorCode::mismatch,
                "allow_wrap is needed, what does not fit would become another number: the "
                "checkpoint's dtype is " +
                    both);
  }
}

namespace {

// Sign, exponent, mantissa; what the largest exponent and the negative zero stand for.
struct Shape8 {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  enum class Top { numbers_but_nan, infinities, numbers } top;
};

struct NamedShape {
  DType dtype;
  Shape8 shape;
};

constexpr std::array<NamedShape, 4> kShapes{
    {{DType::float8_e4m3fn, {4, 3, 7, Shape8::Top::numbers_but_nan}},
     {DType::float8_e5m2, {5, 2, 15, Shape8::Top::infinities}},
     {DType::float8_e4m3fnuz, {4, 3, 8, Shape8::Top::numbers}},
     {DType::float8_e5m2fnuz, {5, 2, 16, Shape8::Top::numbers}}}};

std::optional<Shape8> shape_of(DType dtype) {
  const auto* found = std::ranges::find(kShapes, dtype, &NamedShape::dtype);
  if (found == kShapes.end()) return std::nullopt;
  return found->shape;
}

// The fields of a byte.
struct Bits8 {
  float sign;
  int exponent;
  int mantissa;
};

Bits8 bits_of(const Shape8& shape, unsigned byte) {
  return {(byte & 0x80U) != 0 ? -1.0F : 1.0F,
          static_cast<int>((byte & 0x7FU) >> static_cast<unsigned>(shape.mantissa_bits)),
          static_cast<int>(byte & ((1U << shape.mantissa_bits) - 1))};
}

bool is_infinite(const Shape8& shape, const Bits8& bits) {
  return shape.top == Shape8::Top::infinities && bits.mantissa == 0 &&
         bits.exponent == (1 << shape.exponent_bits) - 1;
}

bool is_nan(const Shape8& shape, const Bits8& bits) {
  const bool top = bits.exponent == (1 << shape.exponent_bits) - 1;
  switch (shape.top) {
    case Shape8::Top::numbers:  // there is no negative zero
      return bits.sign < 0 && bits.exponent == 0 && bits.mantissa == 0;
    case Shape8::Top::infinities:
      return top && bits.mantissa != 0;
    case Shape8::Top::numbers_but_nan:
      return top && bits.mantissa == (1 << shape.mantissa_bits) - 1;
  }
  return false;
}

float value_of(const Shape8& shape, unsigned byte) {
  const Bits8 bits = bits_of(shape, byte);
  if (is_nan(shape, bits)) return std::numeric_limits<float>::quiet_NaN();
  if (is_infinite(shape, bits)) return bits.sign * std::numeric_limits<float>::infinity();
  const int hidden = bits.exponent == 0 ? 0 : 1 << shape.mantissa_bits;
  const int power = std::max(bits.exponent, 1) - shape.bias - shape.mantissa_bits;
  return bits.sign * std::ldexp(static_cast<float>(bits.mantissa + hidden), power);
}

// A byte of float8_e8m0fnu is the exponent of a power of two.
std::array<float, 256> powers_of_two() {
  std::array<float, 256> values{};
  for (int i = 0; i < 255; ++i) values[static_cast<std::size_t>(i)] = std::ldexp(1.0F, i - 127);
  values[255] = std::numeric_limits<float>::quiet_NaN();
  return values;
}

}  // namespace

bool is_small_float(DType dtype) noexcept {
  return dtype == DType::float8_e8m0fnu || shape_of(dtype).has_value();
}

std::array<float, 256> float8_values(DType dtype) {
  if (dtype == DType::float8_e8m0fnu) return powers_of_two();
  const std::optional<Shape8> shape = shape_of(dtype);
  if (!shape) {
    throw Error(ErrorCode::unsupported,
                std::string(to_string(dtype)) + " is not floating point of 8 bits");
  }
  std::array<float, 256> values{};
  for (unsigned i = 0; i < 256; ++i) values[i] = value_of(*shape, i);
  return values;
}

namespace {

// Any byte but 0 is true: a C++ bool must not hold what another program left in a file.
struct Bool8 {
  std::uint8_t bits;
  operator std::uint8_t() const { return bits != 0 ? 1 : 0; }  // NOLINT
};

template <typename T>
constexpr bool kIs16Bit = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;

// A float outside the range of 64 bits, and NaN, give the least number.
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

namespace {

// All whole numbers up to this are elements of the type.
double last_whole(DType dtype) {
  if (dtype == DType::bfloat16) return 256;
  return dtype == DType::float16 ? 2048 : 16777216;
}

double largest_finite(DType dtype) {
  if (dtype == DType::bfloat16) return 0x1.FEp127;
  return dtype == DType::float16 ? 65504 : std::numeric_limits<float>::max();
}

// Looks at so many numbers at a time: a constant, so that the loops become vector code.
constexpr std::size_t kLookedAt = 1024;

// NaN is not larger.
template <typename Number>
bool has_larger(const std::array<Number, kLookedAt>& numbers, Number most) {
  unsigned larger = 0;
  for (std::size_t i = 0; i < kLookedAt; ++i)
    larger |= static_cast<unsigned>(numbers[i] > most) | static_cast<unsigned>(numbers[i] < -most);
  return larger != 0;
}

void add_changes(std::span<const double> before, std::span<const double> after, CastLoss& loss) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (!std::isfinite(before[i]) || before[i] == after[i]) continue;
    const bool is_infinite = std::isinf(after[i]);
    loss.infinities = loss.infinities || is_infinite;
    loss.integers = loss.integers || (!is_infinite && before[i] == std::trunc(before[i]));
  }
}

}  // namespace

void add_loss(DType from, const std::byte* in, DType to, const std::byte* out, std::int64_t count,
              CastLoss& loss) {
  if (!info(from).floating || !info(to).floating || size_of(from) < size_of(to)) return;
  std::array<float, kLookedAt> singles{};  // what is behind the last number is small
  std::array<double, kLookedAt> before{}, after{};
  for (std::int64_t begin = 0; begin < count; begin += kLookedAt) {
    if (loss.integers && loss.infinities) return;
    const double most = loss.integers ? largest_finite(to) : last_whole(to);
    const std::int64_t part = std::min<std::int64_t>(kLookedAt, count - begin);
    const auto size = static_cast<std::size_t>(part);
    const std::byte* old = in + static_cast<std::size_t>(begin) * size_of(from);
    const std::byte* made = out + static_cast<std::size_t>(begin) * size_of(to);
    if (from == DType::float64) {
      cast(from, old, DType::float64, reinterpret_cast<std::byte*>(before.data()), part);
      if (!has_larger(before, most)) continue;
    } else {
      cast(from, old, DType::float32, reinterpret_cast<std::byte*>(singles.data()), part);
      if (!has_larger(singles, static_cast<float>(most))) continue;
      cast(from, old, DType::float64, reinterpret_cast<std::byte*>(before.data()), part);
    }
    cast(to, made, DType::float64, reinterpret_cast<std::byte*>(after.data()), part);
    add_changes(std::span(before).first(size), std::span(after).first(size), loss);
  }
}

}  // namespace tessera
