// What is read of files of the gguf package, beside what the package reads there
// (tests/golden/make/gguf_files.py).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>

#include <nlohmann/json.hpp>

#include "base/crc32.h"
#include "format/gguf/gguf.h"
#include "format/gguf/testing.h"
#include "format/test_support.h"

namespace tessera::gguf {
namespace {

nlohmann::json expected() {
  std::ifstream file(std::string(TESSERA_TEST_DATA) + "/golden/gguf/expected.json");
  return nlohmann::json::parse(file);
}

Header read(std::vector<std::byte> bytes) {
  return read_header(*tessera::test::source(std::move(bytes)));
}

// The value as JSON has it; bytes are a list of numbers there.
nlohmann::json json_of(const Value& value) {
  switch (value.kind()) {
    case Value::Kind::boolean:
      return value.as_bool();
    case Value::Kind::integer:
      if (value.as_integer().big.empty()) return value.as_int();
      return load_le<std::uint64_t>(value.as_integer().big.data());
    case Value::Kind::real:
      return value.as_real();
    case Value::Kind::string:
      return value.as_string();
    case Value::Kind::bytes: {
      auto list = nlohmann::json::array();
      for (const std::byte byte : value.as_bytes()) list.push_back(std::to_integer<int>(byte));
      return list;
    }
    default: {
      auto list = nlohmann::json::array();
      for (const Value& item : value.items()) list.push_back(json_of(item));
      return list;
    }
  }
}

class GgufGolden : public testing::TestWithParam<const char*> {};

TEST_P(GgufGolden, IsWhatThePackageReads) {
  const std::vector<std::byte> bytes =
      tessera::test::golden("gguf/" + std::string(GetParam()) + ".gguf");
  const nlohmann::json file = expected().at(std::string(GetParam()) + ".gguf");
  const Header header = read(bytes);
  EXPECT_EQ(header.values.size(), file.at("values").size());
  for (const auto& [key, value] : header.values)
    EXPECT_EQ(json_of(value), file.at("values").at(key)) << key;
  EXPECT_EQ(header.entries.size(), file.at("tensors").size());
  for (const Entry& entry : header.entries) {
    const nlohmann::json& row = file.at("tensors").at(entry.name);
    EXPECT_EQ(entry.type->name, row.at("type").get<std::string>()) << entry.name;
    Shape shape = entry.shape;
    if (!entry.type->dtype) shape.back() = shape.back() / entry.type->elements * entry.type->bytes;
    // numpy has no bfloat16: the package gives its bytes.
    if (entry.type->dtype == DType::bfloat16) shape.back() *= 2;
    EXPECT_EQ(shape, row.at("shape").get<Shape>()) << entry.name;
    const auto data = ByteView(bytes).subspan(entry.begin, entry.end - entry.begin);
    EXPECT_EQ(crc32(data), row.at("crc32").get<std::uint32_t>()) << entry.name;
  }
  EXPECT_EQ(header.trailing, 0U);
}

INSTANTIATE_TEST_SUITE_P(Files, GgufGolden,
                         testing::Values("every", "version2", "aligned", "vocabulary"));

// What lies in the padding behind the last tensor is nobody's, and may be missing.
TEST(GgufRead, TheLastPadding) {
  const auto make = [](std::size_t behind) {
    return read(test::Bytes().head(1, 0).tensor("t", {1}).pad(32).zeros(4 + behind)).trailing;
  };
  EXPECT_EQ(make(0), 0U);
  EXPECT_EQ(make(1), 0U);
  EXPECT_EQ(make(28), 0U);
  EXPECT_EQ(make(29), 1U);
  EXPECT_EQ(read(test::Bytes().head(0, 0)).trailing, 0U);
  EXPECT_EQ(read(test::Bytes().head(0, 0).pad(32)).trailing, 0U);
  EXPECT_EQ(read(test::Bytes().head(0, 0).pad(32).zeros(3)).trailing, 3U);
}

TEST(GgufRead, TensorsInAnyOrderAndScalars) {
  const Header header = read(test::Bytes()
                                 .head(3, 0)
                                 .tensor("b", {1}, 24, 32)
                                 .tensor("a", {2, 3}, 0, 64)
                                 .tensor("", {}, 28, 0)
                                 .pad(32)
                                 .zeros(96));
  ASSERT_EQ(header.entries.size(), 3U);
  EXPECT_EQ(header.entries[0].name, "");
  EXPECT_EQ(header.entries[0].shape, Shape{});
  EXPECT_EQ(header.entries[0].end - header.entries[0].begin, 8U);
  EXPECT_EQ(header.entries[1].name, "b");
  EXPECT_EQ(header.entries[2].shape, (Shape{3, 2}));
}

TEST(GgufRead, TextsThatAreNotUtf8AreBytes) {
  const Header header = read(test::Bytes()
                                 .head(0, 2)
                                 .key("a", 8)
                                 .text("\xff\xfe")
                                 .key("b", 9)
                                 .u32(8)
                                 .u64(2)
                                 .text("x")
                                 .text("\xed\xa0\x80"));
  EXPECT_EQ(header.values[0].second, Value::bytes({std::byte{0xff}, std::byte{0xfe}}));
  EXPECT_EQ(header.values[1].second.at(0), Value("x"));
  EXPECT_TRUE(header.values[1].second.at(1).is(Value::Kind::bytes));
}

// A header of many windows, of which each byte is read once.
TEST(GgufRead, LongHeaders) {
  test::Bytes bytes;
  bytes.head(1, 1).key("tokens", 9).u32(8).u64(200'000);
  for (int i = 0; i < 200'000; ++i) bytes.text("token " + std::to_string(i));
  bytes.tensor("t", {1}).pad(32).zeros(4);
  const auto source = tessera::test::CountingSource(tessera::test::source(bytes));
  const Header header = read_header(source);
  EXPECT_EQ(header.values[0].second.at(199'999), Value("token 199999"));
  EXPECT_EQ(source.bytes, source.size());
  EXPECT_LT(source.reads, 12U);
}

TEST(GgufRead, SurvivesDamage) {
  const std::vector<std::byte> bytes = tessera::test::golden("gguf/every.gguf");
  const Header header = read(bytes);
  // Without the last padding the file is whole.
  for (const std::size_t size : tessera::test::damage(bytes, 5000, read))
    EXPECT_GE(size, header.entries.back().end);
}

}  // namespace
}  // namespace tessera::gguf
