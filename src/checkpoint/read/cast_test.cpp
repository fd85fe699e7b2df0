#include "checkpoint/read/cast.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include "tessera/error.h"

namespace tessera {
namespace {

template <typename To, typename From>
To cast_one(DType from, From value, DType to) {
  To result{};
  cast(from, reinterpret_cast<const std::byte*>(&value), to, reinterpret_cast<std::byte*>(&result),
       1);
  return result;
}

TEST(Cast, RoundsToNearestEven) {
  // bfloat16 keeps 8 bits: 1 + 2^-8 lies in the middle and goes to the even neighbour below.
  EXPECT_EQ(cast_one<std::uint16_t>(DType::float32, 1.00390625F, DType::bfloat16), 0x3F80);
  EXPECT_EQ(cast_one<std::uint16_t>(DType::float32, 1.01171875F, DType::bfloat16), 0x3F82);
  EXPECT_EQ(cast_one<std::uint16_t>(DType::float32, 65520.0F, DType::float16), 0x7C00);  // infinity
  EXPECT_EQ(cast_one<std::uint16_t>(DType::float32, std::nanf(""), DType::bfloat16), 0x7FC0);
}

TEST(Cast, WidensExactly) {
  EXPECT_EQ(cast_one<float>(DType::bfloat16, std::uint16_t{0xC049}, DType::float32), -3.140625F);
  EXPECT_EQ(cast_one<double>(DType::float16, std::uint16_t{0x0001}, DType::float64),
            std::ldexp(1.0, -24));
}

TEST(Cast, IntegersAndBooleans) {
  EXPECT_EQ(cast_one<std::int8_t>(DType::int64, std::int64_t{300}, DType::int8), 44);
  EXPECT_EQ(cast_one<std::int32_t>(DType::float32, -2.9F, DType::int32), -2);
  EXPECT_EQ(cast_one<std::uint8_t>(DType::float32, 0.25F, DType::bool8), 1);
}

TEST(Cast, OtherPairsAreUnsupported) {
  EXPECT_FALSE(can_cast(DType::complex64, DType::float32));
  EXPECT_THROW((void)cast_one<float>(DType::float8_e4m3fn, std::uint8_t{1}, DType::float32), Error);
}

// The value of one element as a whole number; none: it is not one.
std::optional<__int128> whole_value(DType dtype, const std::byte* element) {
  if (!info(dtype).floating) {
    std::int64_t value = 0;
    const bool is_unsigned = to_string(dtype)[0] == 'u' || dtype == DType::bool8;
    const bool negative = !is_unsigned && std::to_integer<int>(element[size_of(dtype) - 1]) >= 0x80;
    if (negative) value = -1;
    std::memcpy(&value, element, size_of(dtype));
    return is_unsigned ? static_cast<__int128>(static_cast<std::uint64_t>(value)) : value;
  }
  double value = 0;
  cast(dtype, element, DType::float64, reinterpret_cast<std::byte*>(&value), 1);
  if (value != std::floor(value) || std::abs(value) > 1e30) return std::nullopt;
  return static_cast<__int128>(value);
}

// Issue 15, 7.3: a pair is one that wraps exactly when some value becomes another whole number in
// an integer type. Bit patterns are the extremes and random ones.
TEST(Cast, WrapsExactlyWhereAValueBecomesAnother) {
  std::mt19937_64 random(3);
  std::vector<std::uint64_t> patterns = {0,
                                         1,
                                         0x7f,
                                         0x80,
                                         0xff,
                                         0x7fff,
                                         0x8000,
                                         0xffff,
                                         0x3f00,
                                         0x43960000,
                                         0x7fffffff,
                                         0x80000000,
                                         0xffffffff,
                                         0x7fffffffffffffff,
                                         0x8000000000000000,
                                         ~std::uint64_t{0}};
  for (int i = 0; i < 200; ++i) patterns.push_back(random());
  for (const DTypeInfo& from : dtype_table()) {
    for (const DTypeInfo& to : dtype_table()) {
      if (!can_cast(from.dtype, to.dtype)) continue;
      const bool same = from.dtype == to.dtype;
      if (info(to.dtype).floating || same) {
        EXPECT_FALSE(can_wrap(from.dtype, to.dtype)) << from.torch << " " << to.torch;
        continue;
      }
      bool changes = false;
      for (std::uint64_t pattern : patterns) {
        if (from.dtype == DType::bool8) pattern &= 1;
        std::byte in[8];
        std::byte out[8] = {};
        std::memcpy(in, &pattern, 8);
        cast(from.dtype, in, to.dtype, out, 1);
        changes = changes || whole_value(from.dtype, in) != whole_value(to.dtype, out);
      }
      EXPECT_EQ(can_wrap(from.dtype, to.dtype), changes) << from.torch << " " << to.torch;
    }
  }
}

}  // namespace
}  // namespace tessera
