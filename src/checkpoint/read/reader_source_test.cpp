#include "checkpoint/read/reader_source.h"

#include <gtest/gtest.h>

#include "tessera/io.h"

namespace tessera {
namespace {

// `count` runs of `length` elements of piece 0 with `gap` elements between them.
std::vector<Copy> runs_of(std::int64_t count, std::int64_t length, std::int64_t gap) {
  std::vector<Copy> plan;
  for (std::int64_t i = 0; i < count; ++i)
    plan.push_back({0, 0, i * (length + gap), i * length, length});
  return plan;
}

std::int64_t closed_bytes(const std::vector<Copy>& plan, std::uint64_t cost = kNearRequest) {
  return gaps_to_close(plan, std::vector{free_gap_of(cost)}, 4).at(0) * 4;
}

TEST(Coalesce, ColumnsOfAWideTensorAreReadExactly) {
  EXPECT_LT(closed_bytes(runs_of(1000, 2048, 2048)), 2048 * 4);
}

TEST(Coalesce, FarAwayWhatIsShorterThanARequestIsReadOver) {
  EXPECT_GE(closed_bytes(runs_of(1000, 2048, 2048), 1U << 20U), 2048 * 4);
  EXPECT_LT(closed_bytes(runs_of(1000, 2048, 1 << 18), 1U << 20U), 1 << 20);
  EXPECT_EQ(free_gap_of(1), kFreeGapBytes);
}

TEST(Coalesce, ShortGapsAreReadOver) {
  EXPECT_GE(closed_bytes(runs_of(1000, 1, 1)), 4);
  EXPECT_GE(closed_bytes(runs_of(1000, 4, 1000)), 1000 * 4);
}

TEST(Coalesce, SmallHolesInLargeRunsAreReadOver) {
  EXPECT_GE(closed_bytes(runs_of(10, 1 << 20, 16 << 10)), (16 << 10) * 4);
}

TEST(Coalesce, HolesOfMoreThanASpanStayUnread) {
  EXPECT_LT(closed_bytes(runs_of(10, 1 << 30, 1 << 18)), 1 << 20);
}

TEST(Coalesce, LargeHolesDoNotForbidToCloseSmallOnes) {
  std::vector<Copy> plan = runs_of(100, 1 << 16, 1 << 11);
  plan.push_back({0, 0, std::int64_t{1} << 40, 100 << 16, 10});
  EXPECT_GE(closed_bytes(plan), (1 << 11) * 4);
}

TEST(Coalesce, PiecesAreJudgedOneByOne) {
  std::vector<Copy> plan = runs_of(10, 1 << 20, 16 << 10);
  for (Copy copy : runs_of(1000, 2048, 4096)) {
    copy.from = 2;
    plan.push_back(copy);
  }
  const std::vector<std::int64_t> closed = gaps_to_close(plan, std::vector(3, kFreeGapBytes), 4);
  EXPECT_GE(closed[0], 16 << 10);
  EXPECT_LT(closed[2], 4096);
  EXPECT_EQ(closed[1] * 4, kFreeGapBytes);
}

}  // namespace
}  // namespace tessera
