#include <set>
#include <string>

#include "layout/testing.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

TEST(DType, TheTableIsInEnumOrder) {
  const auto table = dtype_table();
  ASSERT_EQ(table.size(), static_cast<std::size_t>(DType::float4_e2m1fn_x2) + 1);
  for (std::size_t i = 0; i < table.size(); ++i) {
    EXPECT_EQ(static_cast<std::size_t>(table[i].dtype), i);
    EXPECT_EQ(&info(table[i].dtype), &table[i]);
  }
}

TEST(DType, EveryNameLeadsBackToItsRow) {
  std::set<std::string_view> names;
  for (const DTypeInfo& row : dtype_table()) {
    EXPECT_EQ(dtype_from_torch(row.torch), row.dtype);
    if (!row.storage.empty()) {
      EXPECT_EQ(dtype_from_storage(row.storage), row.dtype);
    }
    if (!row.safetensors.empty()) {
      EXPECT_EQ(dtype_from_safetensors(row.safetensors), row.dtype);
    }
    EXPECT_TRUE(names.insert(row.torch).second) << row.torch;
  }
}

TEST(DType, KnownRows) {
  EXPECT_EQ(size_of(DType::bfloat16), 2U);
  EXPECT_EQ(size_of(DType::complex128), 16U);
  EXPECT_EQ(to_string(DType::bool8), "bool");
  EXPECT_EQ(dtype_from_storage("ComplexFloatStorage"), DType::complex64);
  EXPECT_EQ(dtype_from_safetensors("C64"), DType::complex64);
  EXPECT_EQ(dtype_from_safetensors("F8_E4M3"), DType::float8_e4m3fn);
  EXPECT_TRUE(info(DType::float8_e8m0fnu).floating);
  EXPECT_FALSE(info(DType::complex64).floating);
  EXPECT_FALSE(info(DType::uint16).floating);
}

TEST(DType, UnknownAndEmptyNamesAreUnsupported) {
  EXPECT_EQ(error_of([] { (void)dtype_from_torch("qint8"); }).code(), ErrorCode::unsupported);
  EXPECT_EQ(error_of([] { (void)dtype_from_storage(""); }).code(), ErrorCode::unsupported);
  EXPECT_EQ(error_of([] { (void)dtype_from_safetensors("f32"); }).code(), ErrorCode::unsupported);
}

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
