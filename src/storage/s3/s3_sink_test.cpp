#include "storage/s3/s3_sink.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera::s3 {
namespace {

TEST(PartPlan, PartsFollowOneAnotherWithinTheLimitsOfTheServer_O22) {
  std::mt19937_64 random(19);
  for (int i = 0; i < 200; ++i) {
    const std::uint64_t hint = i == 0 ? 0 : random() % (kLargestObject >> (random() % 40)) + 1;
    const PartPlan plan(hint);
    std::uint64_t at = 0;
    int number = 0;
    while (at < kLargestObject && number < kMostParts) {
      const Part part = plan.part_at(at);
      ASSERT_EQ(part.number, ++number);
      ASSERT_EQ(part.begin, at);
      ASSERT_GE(part.end - part.begin, kSmallestPart);
      ASSERT_LE(part.end - part.begin, kLargestPart) << hint << ", part " << number;
      const std::uint64_t inside = at + random() % (part.end - at);
      if (inside < kLargestObject) {
        ASSERT_EQ(plan.part_at(inside).begin, at);
      }
      at = part.end;
    }
    EXPECT_GE(at, hint == 0 ? kLargestObject : hint);
  }
}

TEST(PartPlan, ExpectedBytesLieInPartsOfOneSize) {
  const std::uint64_t hint = 1'000'000 * kMiB;
  const PartPlan plan(hint);
  const Part last = plan.part_at(hint - 1);
  EXPECT_LE(last.number, 5'000);
  EXPECT_EQ(last.end - last.begin, plan.part_at(0).end);
  EXPECT_EQ(plan.part_at(0).end, 200 * kMiB);
}

TEST(PartPlan, WhatNoObjectHoldsIsALimit_O22) {
  EXPECT_EQ(code_of([] { (void)PartPlan(kLargestObject + 1); }), ErrorCode::limit);
  EXPECT_EQ(code_of([] { (void)PartPlan(0).part_at(kLargestObject); }), ErrorCode::limit);
  // Announced were a few bytes.
  EXPECT_EQ(code_of([] { (void)PartPlan(5).part_at(kLargestObject / 2); }), ErrorCode::limit);
  EXPECT_EQ(PartPlan(kLargestObject).part_at(kLargestObject - 1).number, 4'998);
}

// Beside a plain array of bytes, and of whether each was written.
TEST(PartBuffer, KnowsWhatIsMissingAndZeroesIt) {
  std::mt19937 random(7);
  for (int round = 0; round < 300; ++round) {
    const std::size_t size = 1 + random() % 60;
    PartBuffer buffer(size);
    std::string bytes(size, '\0');
    std::string seen(size, 'n');
    for (unsigned writes = random() % 12; writes > 0; --writes) {
      const std::size_t begin = random() % size;
      const std::size_t length = 1 + random() % (size - begin);
      const std::string text(length, static_cast<char>('a' + random() % 26));
      buffer.copy(begin, std::as_bytes(std::span(text)));
      buffer.note(begin, length);
      bytes.replace(begin, length, text);
      seen.replace(begin, length, std::string(length, 'y'));
      ASSERT_EQ(buffer.is_full(), std::ranges::count(seen, 'n') == 0);
    }
    const ByteView filled = buffer.filled(size);
    ASSERT_EQ(std::string(reinterpret_cast<const char*>(filled.data()), filled.size()), bytes);
  }
}

}  // namespace
}  // namespace tessera::s3
