#include "base/numbers.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

constexpr auto kMax = std::numeric_limits<std::int64_t>::max();
constexpr auto kMin = std::numeric_limits<std::int64_t>::min();
constexpr auto kUMax = std::numeric_limits<std::uint64_t>::max();

template <typename F>
void expect_limit(F&& call) {
  try {
    (void)call();
    FAIL() << "expected an Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::limit);
  }
}

TEST(Checked, GivesTheResultUpToTheLastValue) {
  EXPECT_EQ(checked_add(kMax - 1, std::int64_t{1}), kMax);
  EXPECT_EQ(checked_sub(kMin + 1, std::int64_t{1}), kMin);
  EXPECT_EQ(checked_mul(std::int64_t{1} << 31, std::int64_t{1} << 31), std::int64_t{1} << 62);
  EXPECT_EQ(checked_add(kUMax - 1, std::uint64_t{1}), kUMax);
}

TEST(Checked, ThrowsLimitOneAfterIt) {
  expect_limit([] { return checked_add(kMax, std::int64_t{1}); });
  expect_limit([] { return checked_sub(kMin, std::int64_t{1}); });
  expect_limit([] { return checked_mul(kMin, std::int64_t{-1}); });
  expect_limit([] { return checked_add(kUMax, std::uint64_t{1}); });
  expect_limit([] { return checked_sub(std::uint64_t{0}, std::uint64_t{1}); });
  expect_limit([] { return checked_mul(kUMax, std::uint64_t{2}); });
}

TEST(Checked, NarrowKeepsTheNumberOrThrows) {
  EXPECT_EQ(narrow<std::int8_t>(std::int64_t{-128}), -128);
  EXPECT_EQ(narrow<std::uint64_t>(kMax), static_cast<std::uint64_t>(kMax));
  expect_limit([] { return narrow<std::int8_t>(std::int64_t{128}); });
  expect_limit([] { return narrow<std::uint64_t>(std::int64_t{-1}); });
  expect_limit([] { return narrow<std::int64_t>(kUMax); });
}

}  // namespace
}  // namespace tessera
