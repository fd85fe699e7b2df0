#include "tessera/dtype.h"

#include <set>
#include <string>

#include "layout/testing.h"

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

}  // namespace
}  // namespace tessera
