#include "layout/plan.h"

#include <chrono>

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

using Slices = std::vector<Slice>;

void expect_fault(const Shape& shape, const Slices& pieces, ErrorCode code,
                  const std::string& text) {
  const Error error = error_of([&] { require_covered_once(shape, pieces); });
  EXPECT_EQ(error.code(), code);
  EXPECT_EQ(error.message(), text);
}

TEST(Cover, ExactPartitionsPass) {
  require_covered_once({}, Slices{Box{}});
  require_covered_once({}, Slices{FlatRange{0, 1}});
  require_covered_once({1, 1}, Slices{FlatRange{0, 1}, Box{{1, 0}, {0, 1}}});
  require_covered_once({0, 3}, {});
  require_covered_once({0, 3}, Slices{whole({0, 3})});
  require_covered_once({5}, Slices{Box{{3}, {2}}, Box{{0}, {3}}});
  require_covered_once({4, 3}, Slices{FlatRange{0, 5}, FlatRange{5, 5}, FlatRange{5, 12}});
  // A 2-D grid, and a spiral that no straight cut splits.
  require_covered_once({4, 4}, Slices{Box{{0, 0}, {2, 2}}, Box{{0, 2}, {2, 2}}, Box{{2, 0}, {2, 2}},
                                      Box{{2, 2}, {2, 2}}});
  require_covered_once({3, 3}, Slices{Box{{0, 0}, {1, 2}}, Box{{0, 2}, {2, 1}}, Box{{2, 1}, {1, 2}},
                                      Box{{1, 0}, {2, 1}}, Box{{1, 1}, {1, 1}}});
  // Boxes and flat ranges together.
  require_covered_once({3, 4}, Slices{FlatRange{0, 5}, Box{{1, 1}, {1, 3}}, FlatRange{8, 12}});
}

TEST(Cover, HolesAreNamed) {
  expect_fault({}, {}, ErrorCode::incomplete, "element [] of a tensor of shape [] is in no piece");
  expect_fault({4, 3}, Slices{FlatRange{0, 5}, FlatRange{6, 12}}, ErrorCode::incomplete,
               "element [1, 2] of a tensor of shape [4, 3] is in no piece");
  expect_fault({4, 1, 3}, Slices{Box{{0, 0, 0}, {4, 1, 2}}, Box{{0, 0, 2}, {3, 1, 1}}},
               ErrorCode::incomplete,
               "element [3, 0, 2] of a tensor of shape [4, 1, 3] is in no piece");
}

TEST(Cover, OverlapsAreNamed) {
  expect_fault({}, Slices{Box{}, Box{}}, ErrorCode::conflict,
               "element [] of a tensor of shape [] is in piece 0 and in piece 1");
  expect_fault({4, 3}, Slices{Box{{2, 1}, {1, 1}}, whole({4, 3})}, ErrorCode::conflict,
               "element [2, 1] of a tensor of shape [4, 3] is in piece 0 and in piece 1");
  // The right volume does not make it right: the first fault is the overlap, then the hole.
  expect_fault({4}, Slices{Box{{0}, {2}}, Box{{1}, {2}}}, ErrorCode::conflict,
               "element [1] of a tensor of shape [4] is in piece 0 and in piece 1");
}

TEST(Cover, PiecesOutsideAreCorrupt) {
  EXPECT_EQ(error_of([] {
              require_covered_once({4}, Slices{Box{{0}, {5}}});
            }).code(),
            ErrorCode::corrupt);
}

// 2^60 rows: the work must not depend on them.
TEST(Cover, HugeTensorsCostNoMoreThanSmallOnes) {
  const std::int64_t rows = std::int64_t{1} << 60;
  Slices columns{Box{{0, 0}, {rows, 1}}, Box{{0, 1}, {rows, 2}}, Box{{0, 3}, {rows, 1}}};
  require_covered_once({rows, 4}, columns);
  columns[1] = Box{{0, 1}, {rows - 1, 2}};
  expect_fault({rows, 4}, columns, ErrorCode::incomplete,
               "element [" + std::to_string(rows - 1) + ", 1] of a tensor of shape [" +
                   std::to_string(rows) + ", 4] is in no piece");
}

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
