#include <gtest/gtest.h>

#include "format/safetensors/safetensors.h"
#include "format/test_support.h"

namespace tessera::safetensors {
namespace {

std::vector<std::byte> head(const std::vector<std::byte>& file, std::uint64_t size) {
  return {file.begin(), file.begin() + static_cast<std::ptrdiff_t>(size)};
}

Entry entry(std::string name, DType dtype, Shape shape) {
  return {std::move(name), dtype, std::move(shape), 0, 0};
}

// F-06, F-07: the header that the reference library writes for the same tensors.
TEST(SafetensorsEncode, IsTheReferenceLibrarysHeader) {
  for (const char* name : {"dtypes.safetensors", "empty.safetensors", "olmo.safetensors"}) {
    const std::vector<std::byte> file = test::golden(name);
    const Header read = read_header(*test::source(file));
    Header header;
    header.metadata = read.metadata;
    header.entries.assign(read.entries.rbegin(), read.entries.rend());
    EXPECT_EQ(encode_header(header), head(file, read.data_offset)) << name;
    EXPECT_EQ(header.data_offset, read.data_offset) << name;
  }
}

TEST(SafetensorsEncode, SortsAndPlaces) {
  Header header;
  header.entries = {entry("b", DType::float32, {3}), entry("a", DType::float32, {}),
                    entry("z", DType::float64, {1}), entry("mask", DType::bool8, {3})};
  const std::vector<std::byte> bytes = encode_header(header);
  EXPECT_EQ(bytes.size() % 8, 0U);
  ASSERT_EQ(header.entries.size(), 4U);
  EXPECT_EQ(header.entries[0].name, "z");
  EXPECT_EQ(header.entries[1].name, "a");
  EXPECT_EQ(header.entries[1].begin, 8U);
  EXPECT_EQ(header.entries[2].end, 24U);
  EXPECT_EQ(header.entries[3].end, 27U);
}

TEST(SafetensorsEncode, RefusesWhatReadersWould) {
  const auto code = [](std::vector<Entry> entries) {
    Header header;
    header.entries = std::move(entries);
    const auto [found, threw] = test::thrown([&] { (void)encode_header(header); });
    EXPECT_TRUE(threw);
    return found;
  };
  const auto f32 = DType::float32;
  EXPECT_EQ(code({entry("a", f32, {1}), entry("a", f32, {2})}), ErrorCode::invalid_argument);
  EXPECT_EQ(code({entry("__metadata__", f32, {1})}), ErrorCode::invalid_argument);
  EXPECT_EQ(code({entry("a", DType::complex128, {1})}), ErrorCode::unsupported);
  EXPECT_EQ(code({entry("a", DType::float4_e2m1fn_x2, {})}), ErrorCode::unsupported);
  EXPECT_EQ(code({entry("a", f32, {1LL << 40, 1LL << 40})}), ErrorCode::limit);
  for (const char* name : {"\xff", "\xc0\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xe2\x82"}) {
    EXPECT_EQ(code({entry(name, f32, {1})}), ErrorCode::invalid_argument);
  }
}

}  // namespace
}  // namespace tessera::safetensors
