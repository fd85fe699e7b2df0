#include "layout/plan.h"
#include "layout/testing.h"

namespace tessera {
namespace {

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

}  // namespace
}  // namespace tessera
