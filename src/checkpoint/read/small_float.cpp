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

}  // namespace tessera
