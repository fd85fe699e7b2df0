#include "checkpoint/read/small_float.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include "tessera/error.h"

namespace tessera {
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

float value_of(const Shape8& shape, unsigned byte) {
  constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
  const float sign = (byte & 0x80U) != 0 ? -1.0F : 1.0F;
  const auto mantissa = static_cast<int>(byte & ((1U << shape.mantissa_bits) - 1));
  const int exponent =
      static_cast<int>((byte & 0x7FU) >> static_cast<unsigned>(shape.mantissa_bits));
  const int top_exponent = (1 << shape.exponent_bits) - 1;
  const int top_mantissa = (1 << shape.mantissa_bits) - 1;
  if (shape.top == Shape8::Top::numbers && byte == 0x80U) return kNaN;  // there is no negative zero
  if (exponent == top_exponent && shape.top == Shape8::Top::infinities) {
    return mantissa == 0 ? sign * std::numeric_limits<float>::infinity() : kNaN;
  }
  if (exponent == top_exponent && mantissa == top_mantissa &&
      shape.top == Shape8::Top::numbers_but_nan) {
    return kNaN;
  }
  const int significand = exponent == 0 ? mantissa : mantissa + (1 << shape.mantissa_bits);
  const int power = (exponent == 0 ? 1 : exponent) - shape.bias - shape.mantissa_bits;
  return sign * std::ldexp(static_cast<float>(significand), power);
}

}  // namespace

bool is_small_float(DType dtype) noexcept {
  return dtype == DType::float8_e8m0fnu || shape_of(dtype).has_value();
}

std::array<float, 256> float8_values(DType dtype) {
  std::array<float, 256> values{};
  if (dtype == DType::float8_e8m0fnu) {
    for (int i = 0; i < 255; ++i) values[static_cast<std::size_t>(i)] = std::ldexp(1.0F, i - 127);
    values[255] = std::numeric_limits<float>::quiet_NaN();
    return values;
  }
  const std::optional<Shape8> shape = shape_of(dtype);
  if (!shape) {
    throw Error(ErrorCode::unsupported,
                std::string(to_string(dtype)) + " is not floating point of 8 bits");
  }
  for (unsigned i = 0; i < 256; ++i) values[i] = value_of(*shape, i);
  return values;
}

}  // namespace tessera
