#include "comm/same_host/reduce.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "base/half.h"
#include "conformance/errors.h"

namespace tessera::same_host {
namespace {

template <typename T>
std::vector<T> reduced(DType dtype, Reduction reduction, const std::vector<std::vector<T>>& ranks) {
  std::vector<const std::byte*> sources;
  for (const auto& rank : ranks) sources.push_back(reinterpret_cast<const std::byte*>(rank.data()));
  std::vector<T> out(ranks[0].size());
  reduce(dtype, reduction, sources, reinterpret_cast<std::byte*>(out.data()), out.size());
  return out;
}

template <typename T>
std::vector<std::vector<T>> random_ranks(std::size_t ranks, std::size_t elements) {
  std::mt19937 random(3);
  std::vector<std::vector<T>> all(ranks, std::vector<T>(elements));
  for (auto& rank : all) {
    for (auto& value : rank)
      value = static_cast<T>(static_cast<int>(random() % 2001) - 1000) / T{3};
  }
  return all;
}

// Sizes around a block and its parts.
template <typename T>
void check_number_type(DType dtype) {
  for (const std::size_t elements : {0, 1, 7, 511, 512, 513, 2000}) {
    for (const std::size_t ranks : {1, 2, 3, 4}) {
      const auto all = random_ranks<T>(ranks, elements);
      const auto sum = reduced(dtype, Reduction::sum, all);
      const auto low = reduced(dtype, Reduction::minimum, all);
      const auto high = reduced(dtype, Reduction::maximum, all);
      for (std::size_t i = 0; i < elements; ++i) {
        T total = all[0][i], least = all[0][i], most = all[0][i];
        for (std::size_t r = 1; r < ranks; ++r) {
          total = static_cast<T>(total + all[r][i]);
          least = std::min(least, all[r][i]);
          most = std::max(most, all[r][i]);
        }
        ASSERT_EQ(sum[i], total);
        ASSERT_EQ(low[i], least);
        ASSERT_EQ(high[i], most);
      }
    }
  }
}

TEST(Reduce, NumbersAreAddedInTheOrderOfRanks) {
  check_number_type<float>(DType::float32);
  check_number_type<double>(DType::float64);
  check_number_type<std::int8_t>(DType::int8);
  check_number_type<std::int16_t>(DType::int16);
  check_number_type<std::int32_t>(DType::int32);
  check_number_type<std::int64_t>(DType::int64);
  check_number_type<std::uint8_t>(DType::uint8);
  // An order that can be seen: 1e8 - 1e8 + 1 is 1, 1 + 1e8 - 1e8 is 0.
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::sum, {{1e8F}, {-1e8F}, {1}})[0], 1);
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::sum, {{1}, {1e8F}, {-1e8F}})[0], 0);
}

TEST(Reduce, ShortFloatsAreRoundedOnce) {
  const auto b = [](float value) { return std::vector<BFloat16>{BFloat16::from(value)}; };
  const auto h = [](float value) { return std::vector<Half>{Half::from(value)}; };
  // Rounded after each addition, both would stay at the first number.
  EXPECT_EQ(float(reduced<BFloat16>(DType::bfloat16, Reduction::sum, {b(256), b(1), b(1)})[0]),
            258);
  EXPECT_EQ(float(reduced<Half>(DType::float16, Reduction::sum, {h(2048), h(1), h(1)})[0]), 2050);
  EXPECT_EQ(float(reduced<BFloat16>(DType::bfloat16, Reduction::average, {b(3), b(4)})[0]), 3.5F);
  EXPECT_EQ(float(reduced<Half>(DType::float16, Reduction::maximum, {h(3), h(4)})[0]), 4);
}

TEST(Reduce, AveragesOfFloatsOnly) {
  EXPECT_EQ(reduced<float>(DType::float32, Reduction::average, {{1}, {2}, {6}})[0], 3);
  EXPECT_EQ(reduced<double>(DType::float64, Reduction::average, {{1}, {2}})[0], 1.5);
  EXPECT_FALSE(can_reduce(DType::int32, Reduction::average));
  EXPECT_FALSE(can_reduce(DType::complex64, Reduction::sum));
  EXPECT_EQ(code_of([] {
              reduced<int>(DType::int32, Reduction::average, {{1}, {2}});
            }),
            ErrorCode::unsupported);
  EXPECT_EQ(code_of([] {
              reduced<int>(DType::uint32, Reduction::sum, {{1}, {2}});
            }),
            ErrorCode::unsupported);
}

TEST(Reduce, IntegersWrapAndBoolsStayBools) {
  EXPECT_EQ(reduced<std::int8_t>(DType::int8, Reduction::sum, {{127}, {1}})[0], -128);
  const auto big = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduced<std::int64_t>(DType::int64, Reduction::sum, {{big}, {1}})[0], -big - 1);
  using Bools = std::vector<std::uint8_t>;
  const std::vector<Bools> bools{{0, 0, 1, 1}, {0, 1, 0, 1}};
  EXPECT_EQ(reduced(DType::bool8, Reduction::sum, bools), (Bools{0, 1, 1, 1}));
  EXPECT_EQ(reduced(DType::bool8, Reduction::maximum, bools), (Bools{0, 1, 1, 1}));
  EXPECT_EQ(reduced(DType::bool8, Reduction::minimum, bools), (Bools{0, 0, 0, 1}));
}

TEST(Reduce, NaNWinsAndTheResultMayReplaceASource) {
  const float nan = std::nanf("");
  for (const auto reduction : {Reduction::minimum, Reduction::maximum}) {
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, reduction, {{nan}, {1}})[0]));
    EXPECT_TRUE(std::isnan(reduced<float>(DType::float32, reduction, {{1}, {nan}})[0]));
  }
  auto all = random_ranks<float>(3, 1300);
  const auto expected = reduced(DType::float32, Reduction::sum, all);
  std::vector<const std::byte*> sources;
  for (const auto& rank : all) sources.push_back(reinterpret_cast<const std::byte*>(rank.data()));
  reduce(DType::float32, Reduction::sum, sources, reinterpret_cast<std::byte*>(all[1].data()),
         1300);
  EXPECT_EQ(all[1], expected);
}

}  // namespace
}  // namespace tessera::same_host
