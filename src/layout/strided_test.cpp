#include "layout/strided.h"
#include "layout/testing.h"

namespace tessera {
namespace {

using Visits = std::vector<std::pair<std::int64_t, std::int64_t>>;

Visits visits(const Shape& sizes, const Shape& strides, std::int64_t begin, std::int64_t count) {
  Visits seen;
  for_each_strided_run(sizes, strides, begin, count, [&](std::int64_t position, std::int64_t n) {
    seen.emplace_back(position, n);
  });
  return seen;
}

TEST(StridedRun, DenseArraysAreOneRun) {
  EXPECT_EQ(visits({}, {}, 0, 1), (Visits{{0, 1}}));
  EXPECT_EQ(visits({2, 3}, {3, 1}, 0, 6), (Visits{{0, 6}}));
  EXPECT_EQ(visits({2, 3}, {3, 1}, 2, 3), (Visits{{2, 3}}));
  EXPECT_EQ(visits({1, 3, 1}, {77, 1, 99}, 0, 3), (Visits{{0, 3}}));
  EXPECT_TRUE(visits({2, 0}, {0, 1}, 0, 0).empty());
}

TEST(StridedRun, GapsSeparateRows) {
  EXPECT_EQ(visits({3, 2}, {5, 1}, 1, 4), (Visits{{1, 1}, {5, 2}, {10, 1}}));
  EXPECT_EQ(visits({2, 2}, {1, 2}, 0, 4), (Visits{{0, 1}, {2, 1}, {1, 1}, {3, 1}}));
}

TEST(StridedRun, ExpandedAndNegativeStridesWork) {
  EXPECT_EQ(visits({2, 3}, {0, 1}, 0, 6), (Visits{{0, 3}, {0, 3}}));
  EXPECT_EQ(visits({3}, {-1}, 0, 3), (Visits{{0, 1}, {-1, 1}, {-2, 1}}));
}

TEST(StridedRun, RunsAreMaximalAcrossRows) {
  EXPECT_EQ(visits({2, 2}, {3, 2}, 0, 4), (Visits{{0, 1}, {2, 2}, {5, 1}}));
}

TEST(StridedRun, BadRequestsAreRefused) {
  const auto code = [](const Shape& sizes, const Shape& strides, std::int64_t begin,
                       std::int64_t n) {
    return error_of([&] { (void)visits(sizes, strides, begin, n); }).code();
  };
  EXPECT_EQ(code({2}, {1, 1}, 0, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2}, {1}, 1, 2), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2}, {1}, -1, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({2, 0}, {1, 1}, 0, 1), ErrorCode::invalid_argument);
  EXPECT_EQ(code({3, 2}, {INT64_MAX, 1}, 0, 6), ErrorCode::limit);
  EXPECT_EQ(code({2, 2}, {INT64_MAX, 1}, 0, 4), ErrorCode::limit);
}

}  // namespace
}  // namespace tessera
