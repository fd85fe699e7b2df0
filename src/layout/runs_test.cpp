#include "layout/plan.h"
#include "layout/testing.h"

namespace tessera {
namespace {

using Runs = std::vector<Run>;

TEST(RunSequence, AScalarIsOneRun) {
  EXPECT_EQ(runs_of(Box{}, {}), (Runs{{0, 0, 1}}));
  EXPECT_EQ(runs_of(FlatRange{0, 1}, {}), (Runs{{0, 0, 1}}));
}

TEST(RunSequence, AnEmptySliceHasNone) {
  EXPECT_TRUE(runs_of(Box{{4, 0}, {0, 3}}, {4, 3}).empty());
  EXPECT_TRUE(runs_of(Box{{0, 1}, {4, 0}}, {4, 3}).empty());
  EXPECT_TRUE(runs_of(FlatRange{3, 3}, {4, 3}).empty());
  EXPECT_TRUE(runs_of(whole({2, 0, 3}), {2, 0, 3}).empty());
}

TEST(RunSequence, WholeRowsAreOneRun) {
  EXPECT_EQ(runs_of(Box{{1, 0}, {2, 3}}, {4, 3}), (Runs{{3, 0, 6}}));
  EXPECT_EQ(runs_of(whole({2, 3, 4}), {2, 3, 4}), (Runs{{0, 0, 24}}));
  EXPECT_EQ(runs_of(FlatRange{2, 7}, {4, 3}), (Runs{{2, 0, 5}}));
}

TEST(RunSequence, ColumnsAreOneRunARow) {
  EXPECT_EQ(runs_of(Box{{1, 1}, {3, 2}}, {4, 3}), (Runs{{4, 0, 2}, {7, 2, 2}, {10, 4, 2}}));
  // Two separating dimensions, rows of the last two joined.
  EXPECT_EQ(runs_of(Box{{0, 1, 0}, {2, 2, 2}}, {2, 4, 2}), (Runs{{2, 0, 4}, {10, 4, 4}}));
}

TEST(RunSequence, FindsThePlaceOfAnyPosition) {
  const Shape shape{3, 2, 5, 2};
  for (const Slice& slice : {Slice(Box{{1, 0, 1, 0}, {2, 2, 3, 1}}),
                             Slice(Box{{0, 1, 0, 0}, {3, 1, 5, 2}}), Slice(FlatRange{7, 31})}) {
    const RunSequence sequence(slice, shape);
    for (std::int64_t global = -1; global <= numel(shape); ++global) {
      std::int64_t expected = 0;
      while (expected < sequence.size() &&
             sequence[expected].global + sequence[expected].count <= global) {
        ++expected;
      }
      EXPECT_EQ(sequence.first_ending_after(global), expected) << global;
    }
  }
}

}  // namespace
}  // namespace tessera
