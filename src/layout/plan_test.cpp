#include <chrono>

#include "layout/plan.h"
#include "layout/testing.h"

namespace tessera {
namespace {

using Slices = std::vector<Slice>;
using Plan = std::vector<Copy>;

// Rows of a tensor of shape [rows, columns], as torch.chunk deals them to `pieces`.
Slices row_shards(std::int64_t rows, std::int64_t columns, std::int64_t pieces) {
  Slices slices;
  for (std::int64_t i = 0; i < pieces; ++i) {
    const std::int64_t begin = rows * i / pieces;
    slices.push_back(Box{{begin, 0}, {rows * (i + 1) / pieces - begin, columns}});
  }
  return slices;
}

TEST(Plan, EqualSlicesAreOneCopy) {
  const Slices columns{Box{{0, 0}, {4, 2}}, Box{{0, 2}, {4, 1}}};
  EXPECT_EQ(plan_copies({4, 3}, columns, columns), (Plan{{0, 0, 0, 0, 8}, {1, 1, 0, 0, 4}}));
}

TEST(Plan, AScalarIsOneElement) {
  EXPECT_EQ(plan_copies({}, Slices{Box{}}, Slices{Box{}}), (Plan{{0, 0, 0, 0, 1}}));
  EXPECT_EQ(plan_copies({}, Slices{FlatRange{0, 1}}, Slices{Box{}}), (Plan{{0, 0, 0, 0, 1}}));
}

TEST(Plan, EmptySlicesTakeNoPart) {
  const Slices from{Box{{4, 0}, {0, 3}}, whole({4, 3})};
  const Slices to{Box{{2, 0}, {0, 3}}, FlatRange{5, 5}, FlatRange{0, 12}};
  EXPECT_EQ(plan_copies({4, 3}, from, to), (Plan{{1, 2, 0, 0, 12}}));
  EXPECT_TRUE(plan_copies({0, 3}, Slices{whole({0, 3})}, Slices{whole({0, 3})}).empty());
  EXPECT_TRUE(plan_copies({4, 3}, {}, to).empty());
  EXPECT_TRUE(plan_copies({4, 3}, from, {}).empty());
}

// P-17: rows into columns.
TEST(Plan, RowsIntoColumns) {
  const Slices from{Box{{0, 0}, {1, 4}}, Box{{1, 0}, {1, 4}}};
  const Slices to{Box{{0, 0}, {2, 3}}, Box{{0, 3}, {2, 1}}};
  EXPECT_EQ(plan_copies({2, 4}, from, to),
            (Plan{{0, 0, 0, 0, 3}, {1, 0, 0, 3, 3}, {0, 1, 3, 0, 1}, {1, 1, 3, 1, 1}}));
}

// FSDP1 flat shards (any element boundaries) into FSDP2 rows.
TEST(Plan, FlatRangesIntoRows) {
  const Slices from{FlatRange{0, 5}, FlatRange{5, 12}};
  const Slices to{Box{{0, 0}, {2, 3}}, Box{{2, 0}, {2, 3}}};
  EXPECT_EQ(plan_copies({4, 3}, from, to),
            (Plan{{0, 0, 0, 0, 5}, {1, 0, 0, 5, 1}, {1, 1, 1, 0, 6}}));
}

TEST(Plan, TheLowestReplicaServes) {
  const Slices from{FlatRange{3, 6}, whole({10}), whole({10}), FlatRange{0, 4}};
  EXPECT_EQ(plan_copies({10}, from, Slices{whole({10})}),
            (Plan{{1, 0, 0, 0, 3}, {0, 0, 0, 3, 3}, {1, 0, 6, 6, 4}}));
}

TEST(Plan, MissingElementsAreAbsentAndNamed) {
  const Slices to{Box{{0, 0}, {2, 3}}, Box{{2, 0}, {2, 3}}};
  const auto plan = plan_copies({4, 3}, Slices{FlatRange{0, 7}, FlatRange{8, 12}}, to);
  EXPECT_EQ(plan, (Plan{{0, 0, 0, 0, 6}, {0, 1, 6, 0, 1}, {1, 1, 0, 2, 4}}));
  const Error error = error_of([&] { require_filled({4, 3}, to, plan); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_EQ(error.message(), "element [2, 1] of a tensor of shape [4, 3] is in no piece");
}

TEST(Plan, FilledTargetsPass) {
  const Slices to{Box{{0, 1}, {4, 2}}, Box{{4, 0}, {0, 3}}, FlatRange{2, 9}, Box{{3, 0}, {1, 3}}};
  require_filled({4, 3}, to, plan_copies({4, 3}, row_shards(4, 3, 3), to));
  const Error error = error_of([&] { require_filled({4, 3}, to, {}); });
  EXPECT_EQ(error.message(), "element [0, 1] of a tensor of shape [4, 3] is in no piece");
}

TEST(Plan, SlicesOutsideAreCorrupt) {
  const Slices good{whole({4})};
  const Slices bad{FlatRange{2, 5}};
  EXPECT_EQ(error_of([&] { (void)plan_copies({4}, bad, good); }).code(), ErrorCode::corrupt);
  EXPECT_EQ(error_of([&] { (void)plan_copies({4}, good, bad); }).code(), ErrorCode::corrupt);
}

// Each of these would take minutes if every pair of pieces or every row were looked at.
TEST(Plan, ManyPiecesAreNearLinear) {
  const auto begin = std::chrono::steady_clock::now();
  const std::int64_t rows = 1'000'000'000;
  const auto plan =
      plan_copies({rows, 7}, row_shards(rows, 7, 20'000), row_shards(rows, 7, 30'000));
  EXPECT_EQ(plan.size(), 40'000U);  // the cuts of both, without the common ones
  require_filled({rows, 7}, row_shards(rows, 7, 30'000), plan);
  require_covered_once({rows, 7}, row_shards(rows, 7, 30'000));
  const Slices replicas(5'000, whole({1000, 7}));
  EXPECT_EQ(plan_copies({1000, 7}, replicas, replicas).size(), 5'000U);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(10));
}

}  // namespace
}  // namespace tessera
