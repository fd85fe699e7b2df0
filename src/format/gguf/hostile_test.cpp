// GGUF files that are damaged or hostile: reliability G01 to G20.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "format/gguf/gguf.h"
#include "format/gguf/testing.h"
#include "format/test_support.h"

namespace tessera::gguf {
namespace {

using test::Bytes;

constexpr std::uint64_t kMost = ~std::uint64_t{0};
constexpr std::uint32_t kU8 = 0, kI8 = 1, kU32 = 4, kI32 = 5, kBool = 7, kString = 8, kArray = 9,
                        kU64 = 10;

// That the file is refused with this code, by its path and, where it is about one, by its key.
void expect_refused(const std::vector<std::byte>& bytes, ErrorCode code,
                    const std::string& key = "", std::uint64_t limit = kHeaderLimit) {
  try {
    (void)read_header(*tessera::test::source(bytes), limit);
    ADD_FAILURE() << "it was read: " << key;
  } catch (const Error& error) {
    EXPECT_EQ(to_string(error.code()), to_string(code)) << error.what();
    EXPECT_EQ(error.key(), key) << error.what();
    EXPECT_EQ(error.path(), "bytes under test");
  }
}

// A file of one tensor and as many bytes of data.
Bytes one(const std::vector<std::uint64_t>& sizes, std::uint32_t type = 0, std::uint64_t offset = 0,
          std::size_t data = 64) {
  return Bytes().head(1, 0).tensor("t", sizes, type, offset).pad(32).zeros(data);
}

Bytes aligned(std::uint32_t type) {
  return Bytes().head(1, 1).key("general.alignment", type);
}

TEST(GgufHostile, G01CutFiles) {
  const std::vector<std::byte> whole = Bytes().head(1, 1).key("k", kU8).raw("x").tensor("t", {1});
  for (std::size_t size = 0; size < whole.size(); ++size) {
    const auto [code, threw] = tessera::test::thrown([&] {
      (void)read_header(*tessera::test::source(
          {whole.begin(), whole.begin() + static_cast<std::ptrdiff_t>(size)}));
    });
    EXPECT_TRUE(threw && code == ErrorCode::incomplete) << size;
  }
  expect_refused(one({16}, 0, 0, 63), ErrorCode::incomplete, "t");
}

TEST(GgufHostile, G02OtherFormatsAndVersions) {
  expect_refused(Bytes().raw("GGML").zeros(60), ErrorCode::corrupt);
  expect_refused(Bytes().raw("ggjt").zeros(60), ErrorCode::corrupt);
  for (const std::uint32_t version : {0U, 1U, 4U, 0x03000000U, 0x02000000U, ~0U})
    expect_refused(Bytes().head(0, 0, version), ErrorCode::unsupported);
  try {
    (void)read_header(*tessera::test::source(Bytes().head(0, 0, 0x03000000)));
  } catch (const Error& error) {
    EXPECT_NE(error.message().find("big-endian"), std::string::npos);
  }
}

TEST(GgufHostile, G03CountsThatNoFileHas) {
  for (const std::uint64_t count :
       {kMost, kMost / 13 + 1, std::uint64_t{1} << 63U, std::uint64_t{1'000'001}}) {
    expect_refused(Bytes().head(count, 0), ErrorCode::limit);
    expect_refused(Bytes().head(0, count), ErrorCode::limit);
  }
  expect_refused(Bytes().head(1000, 0).zeros(100), ErrorCode::incomplete);
  expect_refused(Bytes().head(0, 1000).zeros(100), ErrorCode::incomplete);
}

TEST(GgufHostile, G04LengthsOfTexts) {
  for (const std::uint64_t length : {kMost, kMost - 7, std::uint64_t{1} << 63U}) {
    expect_refused(Bytes().head(0, 1).u64(length).zeros(40), ErrorCode::limit);
    expect_refused(Bytes().head(1, 0).u64(length).zeros(40), ErrorCode::limit);
    expect_refused(Bytes().head(0, 1).key("k", kString).u64(length).zeros(40), ErrorCode::limit,
                   "k");
  }
  expect_refused(Bytes().head(0, 1).u64(41).zeros(40), ErrorCode::incomplete);
  expect_refused(Bytes().head(0, 1).key("k", kString).u64(41).zeros(40), ErrorCode::incomplete,
                 "k");
  expect_refused(Bytes().head(0, 1).text(std::string(65536, 'k')).zeros(40), ErrorCode::limit);
  expect_refused(Bytes().head(1, 0).text(std::string(65536, 't')).zeros(40), ErrorCode::limit);
}

TEST(GgufHostile, G05LengthsOfArrays) {
  for (const std::uint32_t type : {kU8, kI8, kI32, kString, kArray, kU64}) {
    for (const std::uint64_t count : {kMost, kMost / 8 + 1, std::uint64_t{1} << 61U}) {
      expect_refused(Bytes().head(0, 1).key("k", kArray).u32(type).u64(count).zeros(64),
                     ErrorCode::limit, "k");
    }
    expect_refused(Bytes().head(0, 1).key("k", kArray).u32(type).u64(65).zeros(64),
                   ErrorCode::incomplete, "k");
  }
}

TEST(GgufHostile, G06ArraysInsideOneAnother) {
  const auto nested = [](int depth) {
    Bytes bytes;
    bytes.head(0, 1).key("k", kArray);
    for (int i = 1; i < depth; ++i) bytes.u32(kArray).u64(1);
    return bytes.u32(kU32).u64(1).u32(7);
  };
  EXPECT_NO_THROW((void)read_header(*tessera::test::source(nested(kMostNesting))));
  expect_refused(nested(kMostNesting + 1), ErrorCode::limit, "k");
  expect_refused(nested(100'000), ErrorCode::limit, "k");
}

// A byte of the file is a value of many bytes in memory.
TEST(GgufHostile, G07MoreValuesThanAnyTokenizerHas) {
  const auto array = [](std::uint32_t type) {
    const std::uint64_t count = kMostValues + 1;
    return Bytes().head(0, 1).key("k", kArray).u32(type).u64(count).zeros(count);
  };
  expect_refused(array(kI8), ErrorCode::limit, "k");
  expect_refused(array(kBool), ErrorCode::limit, "k");
  const Header header = read_header(*tessera::test::source(array(kU8)));
  EXPECT_EQ(header.values[0].second.as_bytes().size(), kMostValues + 1);
}

TEST(GgufHostile, G08TypesOfValues) {
  for (const std::uint32_t type : {13U, 255U, 0x80000000U, ~0U}) {
    expect_refused(Bytes().head(0, 1).key("k", type).zeros(64), ErrorCode::unsupported, "k");
    expect_refused(Bytes().head(0, 1).key("k", kArray).u32(type).u64(1).zeros(64),
                   ErrorCode::unsupported, "k");
  }
  expect_refused(Bytes().head(0, 1).key("k", kBool).raw("\x02"), ErrorCode::corrupt, "k");
}

TEST(GgufHostile, G09KeysAndNames) {
  expect_refused(Bytes().head(0, 1).key("", kU8).raw("x"), ErrorCode::corrupt);
  expect_refused(Bytes().head(0, 1).key("\xff", kU8).raw("x"), ErrorCode::corrupt);
  expect_refused(Bytes().head(0, 1).key("\xed\xa0\x80", kU8).raw("x"), ErrorCode::corrupt);
  expect_refused(Bytes().head(1, 0).tensor("\xc0\x80", {1}).pad(32).zeros(4), ErrorCode::corrupt);
}

TEST(GgufHostile, G10TheSameTwice) {
  expect_refused(
      Bytes().head(0, 3).key("k", kU8).raw("x").key("l", kU8).raw("x").key("k", kU32).u32(1),
      ErrorCode::corrupt, "k");
  expect_refused(Bytes()
                     .head(0, 2)
                     .key("general.alignment", kU32)
                     .u32(32)
                     .key("general.alignment", kU32)
                     .u32(64),
                 ErrorCode::corrupt, "general.alignment");
  expect_refused(Bytes().head(2, 0).tensor("t", {1}).tensor("t", {1}, 0, 32).pad(32).zeros(64),
                 ErrorCode::corrupt, "t");
}

TEST(GgufHostile, G11Alignments) {
  for (const std::uint32_t alignment : {0U, 3U, 33U, ~0U}) {
    expect_refused(aligned(kU32).u32(alignment).tensor("t", {1}).pad(64).zeros(64),
                   ErrorCode::corrupt, "general.alignment");
  }
  for (const std::uint32_t alignment : {0x80000000U, 0x02000000U}) {
    expect_refused(aligned(kU32).u32(alignment).tensor("t", {1}).pad(64).zeros(64),
                   ErrorCode::limit, "general.alignment");
  }
  // llama.cpp took the bytes of any type for the number.
  expect_refused(aligned(kU64).u64(32).tensor("t", {1}).pad(64), ErrorCode::corrupt,
                 "general.alignment");
  expect_refused(aligned(kI32).u32(32).tensor("t", {1}).pad(64), ErrorCode::corrupt,
                 "general.alignment");
  expect_refused(aligned(kString).text("32").tensor("t", {1}).pad(64), ErrorCode::corrupt,
                 "general.alignment");
}

TEST(GgufHostile, G12Dimensions) {
  expect_refused(one({1, 1, 1, 1, 1}), ErrorCode::limit, "t");
  expect_refused(Bytes().head(1, 0).text("t").u32(~0U).zeros(64), ErrorCode::limit, "t");
  const std::uint64_t negative = std::uint64_t{1} << 63U;
  expect_refused(one({negative}), ErrorCode::corrupt, "t");
  expect_refused(one({1, kMost}), ErrorCode::corrupt, "t");
}

// ggml divided by them (its issue 1516, and others after it).
TEST(GgufHostile, G13DimensionsOfZero) {
  for (const auto& sizes : std::vector<std::vector<std::uint64_t>>{
           {0}, {0, 1}, {4, 0}, {1, 1, 0}, {1, 1, 1, 0}, {0, 0, 0, 0}})
    expect_refused(one(sizes), ErrorCode::corrupt, "t");
}

// GHSA-vgg9-87g3-85w8 and what came after it: sizes whose product or sum wraps.
TEST(GgufHostile, G14ProductsThatWrap) {
  const auto most = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  for (const auto& sizes :
       std::vector<std::vector<std::uint64_t>>{{most, 2},
                                               {most},
                                               {std::uint64_t{1} << 62U, 4},
                                               {std::uint64_t{1} << 32U, std::uint64_t{1} << 32U},
                                               {std::uint64_t{1} << 16U, std::uint64_t{1} << 16U,
                                                std::uint64_t{1} << 16U, std::uint64_t{1} << 16U},
                                               {4194305, 4194305, 211106198978564}})
    expect_refused(one(sizes), ErrorCode::limit, "t");
  expect_refused(one({most, 2}, 24), ErrorCode::limit, "t");
  // Its elements fit 63 bits, its bytes do not.
  expect_refused(one({std::uint64_t{1} << 62U}, 28), ErrorCode::limit, "t");
  expect_refused(one({most / 32 * 32}, 9), ErrorCode::limit, "t");
}

TEST(GgufHostile, G15SumsThatWrap) {
  // Two tensors of which the padded sizes together are 0.
  const std::uint64_t huge = (std::uint64_t{1} << 63U) - 32;
  expect_refused(
      Bytes().head(2, 0).tensor("a", {huge}, 24, 0).tensor("b", {huge}, 24, huge).pad(32).zeros(64),
      ErrorCode::limit, "b");
  expect_refused(one({1}, 0, kMost - 31), ErrorCode::limit, "t");
  expect_refused(one({16}, 0, kMost - 31), ErrorCode::limit, "t");
  expect_refused(one({32}, 24, kMost - 63), ErrorCode::limit, "t");
  // It ends where counting ends, so there is no room for its padding.
  expect_refused(one({(std::uint64_t{1} << 63U) - 1}, 24, 0), ErrorCode::incomplete, "t");
}

TEST(GgufHostile, G16RowsWithoutWholeBlocks) {
  expect_refused(one({33}, 8), ErrorCode::corrupt, "t");
  expect_refused(one({16, 2}, 8), ErrorCode::corrupt, "t");
  expect_refused(one({32}, 12), ErrorCode::corrupt, "t");
  expect_refused(one({}, 2), ErrorCode::corrupt, "t");
}

TEST(GgufHostile, G17TypesOfElements) {
  for (const std::uint32_t type : {4U, 5U, 31U, 32U, 33U, 36U, 38U, 42U, 0x80000000U, ~0U})
    expect_refused(one({32}, type), ErrorCode::unsupported, "t");
}

TEST(GgufHostile, G18PlacesOfTensors) {
  const auto two = [](std::uint64_t first, std::uint64_t second) {
    return Bytes()
        .head(2, 0)
        .tensor("a", {16}, 0, first)
        .tensor("b", {16}, 0, second)
        .pad(32)
        .zeros(192);
  };
  EXPECT_NO_THROW((void)read_header(*tessera::test::source(two(0, 64))));
  expect_refused(two(0, 0), ErrorCode::corrupt, "b");    // at one place
  expect_refused(two(0, 32), ErrorCode::corrupt, "b");   // over one another
  expect_refused(two(0, 96), ErrorCode::corrupt, "b");   // a hole
  expect_refused(two(32, 96), ErrorCode::corrupt, "a");  // a hole at the start
  expect_refused(two(0, 65), ErrorCode::corrupt, "b");   // not aligned
  expect_refused(two(64, 128), ErrorCode::corrupt, "a");
}

TEST(GgufHostile, G19DataBehindTheEnd) {
  expect_refused(one({17}, 0, 0, 64), ErrorCode::incomplete, "t");
  expect_refused(one({1'000'000'000'000}, 0, 0, 64), ErrorCode::incomplete, "t");
  expect_refused(one({16}, 0, std::uint64_t{1} << 62U), ErrorCode::corrupt, "t");
  // The header itself reaches past the start of the data that the padding would give.
  expect_refused(Bytes().head(1, 0).tensor("t", {1}), ErrorCode::incomplete, "t");
}

TEST(GgufHostile, G20TheLimitOfTheHeader) {
  Bytes bytes;
  bytes.head(0, 1).key("k", kString).text(std::string(1000, 'x'));
  expect_refused(bytes, ErrorCode::limit, "k", 500);
  expect_refused(bytes, ErrorCode::limit, "", 10);
  expect_refused(bytes, ErrorCode::limit, "", 0);
  EXPECT_NO_THROW((void)read_header(*tessera::test::source(bytes), 1045));
  expect_refused(bytes, ErrorCode::limit, "k", 1044);
}

}  // namespace
}  // namespace tessera::gguf
