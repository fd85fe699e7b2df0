#include "layout/testing.h"

namespace tessera {
namespace {

constexpr std::int64_t kHuge = std::int64_t{1} << 40;

TEST(Shape, Numel) {
  EXPECT_EQ(numel(Shape{}), 1);
  EXPECT_EQ(numel(Shape{3, 4}), 12);
  EXPECT_EQ(numel(Shape{kHuge, 0, kHuge}), 0);
  EXPECT_EQ(error_of([] { (void)numel(Shape{kHuge, kHuge}); }).code(), ErrorCode::limit);
  EXPECT_EQ(error_of([] { (void)numel(Shape{0, -1}); }).code(), ErrorCode::corrupt);
}

TEST(Shape, Strides) {
  EXPECT_EQ(contiguous_strides({}), Shape{});
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Shape{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({2, 0, 4}), (Shape{4, 4, 1}));  // as torch has it
}

TEST(Slice, NumelAndText) {
  EXPECT_EQ(numel(Slice(Box{{1, 0}, {2, 3}})), 6);
  EXPECT_EQ(numel(Slice(FlatRange{4, 9})), 5);
  EXPECT_EQ(numel(Slice(Box{})), 1);
  EXPECT_EQ(to_string(Shape{3, 4}), "[3, 4]");
  EXPECT_EQ(to_string(Slice(Box{{1, 0}, {2, 3}})), "[2, 3] at [1, 0]");
  EXPECT_EQ(to_string(Slice(FlatRange{4, 9})), "elements 4 to 9");
}

TEST(Slice, Inside) {
  const Shape shape{4, 3};
  require_inside(Box{{0, 0}, {4, 3}}, shape);
  require_inside(Box{{4, 0}, {0, 3}}, shape);  // P-18: a rank without data sits at the end
  require_inside(FlatRange{12, 12}, shape);
  require_inside(Box{}, {});
  const std::vector<Slice> outside{
      Box{{1, 0}, {4, 3}}, Box{{0, -1}, {1, 1}}, Box{{0, 0}, {1, -1}},
      Box{{0}, {4}},       Box{{0, 0}, {4}},     Box{{1, 1}, {INT64_MAX, INT64_MAX}},
      FlatRange{-1, 2},    FlatRange{5, 4},      FlatRange{0, 13},
  };
  for (const Slice& slice : outside) {
    const Error error = error_of([&] { require_inside(slice, shape); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
    EXPECT_NE(error.message().find("[4, 3]"), std::string::npos);
  }
}

}  // namespace
}  // namespace tessera
