#include "format/olmo/flat_param.h"

#include <gtest/gtest.h>

#include <numeric>

#include "format/test_support.h"

namespace tessera::olmo {
namespace {

std::vector<Shape> vectors(const std::vector<std::int64_t>& numels) {
  std::vector<Shape> shapes;
  for (const std::int64_t n : numels) shapes.push_back({n});
  return shapes;
}

struct Row {
  std::vector<std::int64_t> numels;
  int world;
  bool aligned;
  std::vector<std::int64_t> with_padding;
  std::int64_t shard;
  std::vector<std::int64_t> zeros;  // a rank
};

// The golden layout numbers of live FSDP1 flat parameters (fp32).
const Row kRows[] = {
    {{21, 7}, 2, false, {21, 7}, 14, {0, 0}},
    {{7}, 4, false, {7}, 2, {0, 0, 0, 1}},
    {{81}, 4, false, {81}, 21, {0, 0, 0, 3}},
    {{45, 5, 5}, 4, false, {45, 5, 5}, 14, {0, 0, 0, 1}},
    {{9}, 4, false, {9}, 3, {0, 0, 0, 3}},
    {{368, 16, 16, 16, 16, 23, 2, 2}, 4, false, {368, 16, 16, 16, 16, 23, 2, 2}, 115, {0, 0, 0, 1}},
    {{21, 7}, 2, true, {21, 3, 7, 1}, 16, {0, 0}},
    {{81}, 2, true, {81, 1}, 41, {0, 0}},
    {{81}, 4, true, {81, 3}, 21, {0, 0, 0, 0}},
    {{45, 5, 5}, 2, true, {45, 3, 5, 3, 5, 1}, 31, {0, 0}},
    {{45, 5, 5}, 4, true, {45, 3, 5, 3, 5, 3}, 16, {0, 0, 0, 0}},
    {{8, 4}, 4, true, {8, 4}, 3, {0, 0, 0, 0}},
    {{368, 16, 16, 16, 16, 23, 2, 2},
     4,
     true,
     {368, 16, 16, 16, 16, 23, 1, 2, 2, 2, 2},
     116,
     {0, 0, 0, 0}},
};

TEST(FlatGeometry, IsThatOfLiveFlatParameters) {
  for (const Row& row : kRows) {
    const FlatGeometry geometry(vectors(row.numels), DType::float32, row.world, row.aligned);
    EXPECT_EQ(geometry.numels(), row.numels);
    EXPECT_EQ(geometry.numels_with_padding(), row.with_padding);
    EXPECT_EQ(geometry.shard_size(), row.shard);
    std::vector<std::int64_t> zeros;
    for (int r = 0; r < row.world; ++r) zeros.push_back(geometry.shard_padding(r));
    EXPECT_EQ(zeros, row.zeros);
  }
}

// Every shard is full, and every element of every parameter is in one shard.
TEST(FlatGeometry, ShardsTileTheParameters) {
  for (const Row& row : kRows) {
    for (int world = 1; world <= 9; ++world) {
      const FlatGeometry geometry(vectors(row.numels), DType::bfloat16, world, row.aligned);
      std::vector<std::int64_t> next(row.numels.size(), 0);
      for (int r = 0; r < world; ++r) {
        std::int64_t at = 0;
        for (const FlatGeometry::Segment& segment : geometry.shard(r)) {
          EXPECT_EQ(segment.offset, at);
          at += segment.count;
          if (segment.param == FlatGeometry::kPadding) continue;
          EXPECT_EQ(segment.begin, next[segment.param]);
          next[segment.param] += segment.count;
        }
        EXPECT_EQ(at, geometry.shard_size());
      }
      EXPECT_EQ(next, row.numels);
    }
  }
}

// The rank samples of the same table: offset in the shard, elements, where in the parameter.
TEST(FlatGeometry, SegmentsOfARank) {
  using Segments = std::vector<FlatGeometry::Segment>;
  const FlatGeometry plain(vectors({21, 7}), DType::float32, 2, false);
  EXPECT_EQ(plain.shard(0), (Segments{{0, 0, 14, 0}}));
  EXPECT_EQ(plain.shard(1), (Segments{{0, 14, 7, 0}, {1, 0, 7, 7}}));
  const FlatGeometry aligned(vectors({45, 5, 5}), DType::float32, 4, true);
  constexpr std::size_t kPadding = FlatGeometry::kPadding;
  EXPECT_EQ(aligned.shard(2), (Segments{{0, 32, 13, 0}, {kPadding, 0, 3, 13}}));
  EXPECT_EQ(aligned.shard(3),
            (Segments{{1, 0, 5, 0}, {kPadding, 0, 3, 5}, {2, 0, 5, 8}, {kPadding, 0, 3, 13}}));
}

TEST(FlatGeometry, RefusesTheImpossible) {
  const auto code = [](const std::vector<Shape>& shapes, int world) {
    return test::thrown([&] { FlatGeometry(shapes, DType::float32, world, true); });
  };
  EXPECT_EQ(code({{4}}, 0).first, ErrorCode::invalid_argument);
  const std::int64_t huge = std::int64_t{1} << 62;
  EXPECT_EQ(code({{huge}, {huge}}, 2), (std::pair{ErrorCode::limit, true}));
}

}  // namespace
}  // namespace tessera::olmo
