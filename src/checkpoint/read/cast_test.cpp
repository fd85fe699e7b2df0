#include "checkpoint/read/cast.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

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

}  // namespace
}  // namespace tessera
