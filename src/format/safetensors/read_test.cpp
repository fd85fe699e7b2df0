#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/numbers.h"
#include "format/safetensors/safetensors.h"
#include "format/test_support.h"

namespace tessera::safetensors {
namespace {

std::vector<std::byte> file(const std::string& json, std::size_t data = 0) {
  std::vector<std::byte> bytes;
  append_le(bytes, static_cast<std::uint64_t>(json.size()));
  for (const char c : json) bytes.push_back(static_cast<std::byte>(c));
  bytes.resize(bytes.size() + data);
  return bytes;
}

Header read(const std::string& json, std::size_t data = 0) {
  return read_header(*test::source(file(json, data)));
}

TEST(SafetensorsRead, EveryDType) {
  const Header header = read_header(*test::source(test::golden("dtypes.safetensors")));
  std::size_t by_name = 0;
  for (const Entry& entry : header.entries) {
    if (entry.name != to_string(entry.dtype)) continue;
    EXPECT_EQ(entry.shape, (Shape{3, 2})) << entry.name;
    ++by_name;
  }
  EXPECT_EQ(by_name, 20U);
  EXPECT_EQ(header.metadata.at("format"), "p\"t\n\x1f");
}

TEST(SafetensorsRead, DistributedCheckpoints) {
  const Header header = read_header(
      *test::source(test::golden("c2_hf_dist/shard-00001-model-00001-of-00001.safetensors")));
  EXPECT_EQ(header.metadata.at("DCP_VERSION"), "1.0");
  // Consolidated files: no padding to 8, no metadata, Python's spacing.
  EXPECT_TRUE(
      read_header(*test::source(test::golden("c2_hf_cons/model-00001-of-00002.safetensors")))
          .metadata.empty());
}

TEST(SafetensorsRead, AcceptsWhatTheReferenceAccepts) {
  EXPECT_TRUE(read("{}").entries.empty());
  EXPECT_TRUE(read(R"({"__metadata__":null})").entries.empty());
  EXPECT_EQ(
      read(
          R"({"a":{"shape":[2],"new":[{"x":[1,"y",null]},2.5],"data_offsets":[0,2],"dtype":"U8"}}   )",
          2)
          .entries.size(),
      1U);
  // T08: empty tensors may sit anywhere between others.
  EXPECT_EQ(
      read(
          R"({"e":{"dtype":"U8","shape":[0],"data_offsets":[2,2]},"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}})",
          2)
          .entries.size(),
      2U);
  EXPECT_EQ(read(R"({"a\u0000\ud83d\ude42":{"dtype":"U8","shape":[],"data_offsets":[0,1]}})", 1)
                .entries[0]
                .name,
            std::string("a\0\xf0\x9f\x99\x82", 6));
}

TEST(SafetensorsRead, Hostile) {
  const auto one = [](const std::string& dtype, const std::string& shape,
                      const std::string& offsets) {
    return R"({"a":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" +
           offsets + "}}";
  };
  struct Case {
    std::string json;
    std::size_t data;
    ErrorCode code;
  };
  std::string many = "[1";
  for (int i = 0; i < 70; ++i) many += ",1";
  std::string deep(5000, '[');
  const auto corrupt = ErrorCode::corrupt;
  const std::vector<Case> cases = {
      {"", 0, corrupt},  // T01: N = 0
      {" {}", 0, corrupt},
      {"\xEF\xBB\xBF{}", 0, corrupt},  // T02, T03
      {"{} x", 0, corrupt},
      {std::string("{}\0\0", 4), 0, corrupt},  // T02
      {"{\"\xff\":{}}", 0, corrupt},
      {R"({"\ud800":{}})", 0, corrupt},  // T02
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}})",
       2, corrupt},                                              // T04
      {R"({"__metadata__":{},"__metadata__":{}})", 0, corrupt},  // T05
      {R"({"__metadata__":{"a":"1","a":"2"}})", 0, corrupt},
      {R"({"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}})", 1, corrupt},
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}})",
       1, corrupt},  // T07
      {R"({"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[2,3]}})",
       3, corrupt},
      {one("U8", "[1]", "[1,2]"), 2, corrupt},
      {one("U8", "[1]", "[1,0]"), 1, corrupt},
      {one("U8", "[2]", "[0,2]"), 3, corrupt},
      {one("U8", "[2]", "[0,2]"), 1, ErrorCode::incomplete},
      {one("U8", "[1]", "[0]"), 1, corrupt},
      {one("U8", "[1]", "[0,1,1]"), 1, corrupt},
      {one("U8", "[4194305,4194305,211106198978564]", "[0,0]"), 0, ErrorCode::limit},  // T09
      {one("U8", "[-1]", "[0,0]"), 0, corrupt},
      {one("U8", "[2.0]", "[0,2]"), 2, corrupt},  // T10
      {one("U8", "[1e3]", "[0,1000]"), 1000, corrupt},
      {one("U8", "[18446744073709551616]", "[0,0]"), 0, corrupt},
      {one("U8", "[9223372036854775808,0]", "[0,0]"), 0, corrupt},
      {one("U8", "[\"2\"]", "[0,2]"), 2, corrupt},
      {one("U8", "[null]", "[0,2]"), 2, corrupt},
      {one("U8", "[[2]]", "[0,2]"), 2, corrupt},
      {one("U8", "2", "[0,2]"), 2, corrupt},
      {one("U8", "[01]", "[0,1]"), 1, corrupt},
      {one("U8", "[0x1]", "[0,1]"), 1, corrupt},  // T19
      {one("U8", "[NaN]", "[0,1]"), 1, corrupt},
      {one("U8", "[1,]", "[0,1]"), 1, corrupt},
      {one("U8", "[1/*one*/]", "[0,1]"), 1, corrupt},
      {one("U8", "[1]", "[0,Infinity]"), 1, corrupt},
      {"{}//", 0, corrupt},
      {one("U8", many + "]", "[0,1]"), 1, ErrorCode::limit},   // T11
      {one("Q8", "[1]", "[0,1]"), 1, ErrorCode::unsupported},  // T12
      {one("F4", "[3]", "[0,2]"), 2, corrupt},
      {one("F4", "[]", "[0,1]"), 1, corrupt},
      {R"({"__metadata__":5})", 0, corrupt},
      {R"({"__metadata__":{"a":{}}})", 0, corrupt},  // T14
      {R"({"__metadata__":)" + deep, 0, corrupt},
      {R"({"a":{"x":)" + deep, 0, ErrorCode::limit},
      {R"({"a":{"dtype":"U8","shape":[1]}})", 1, corrupt},
      {R"({"a":[]})", 0, corrupt},
      {R"({"a":null})", 0, corrupt},
      {"[]", 0, corrupt},
      {"{", 0, corrupt},
  };
  for (const Case& c : cases) {
    const auto [code, threw] = test::thrown([&] { (void)read(c.json, c.data); });
    EXPECT_TRUE(threw) << c.json.substr(0, 200);
    EXPECT_EQ(code, c.code) << c.json.substr(0, 200);
  }
}

TEST(SafetensorsRead, NamesTheKeyAndTheOffset) {
  try {
    (void)read(R"({"a.weight":{"dtype":"Q8"}})");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.key(), "a.weight");
    EXPECT_TRUE(error.offset().has_value());
  }
}

// T01: lengths that the file does not have are refused before anything is allocated.
TEST(SafetensorsRead, HeaderLength) {
  const auto code = [](std::uint64_t length, std::uint64_t limit) {
    std::vector<std::byte> bytes;
    append_le(bytes, length);
    bytes.resize(20);
    return test::thrown([&] { (void)read_header(*test::source(bytes), limit); }).first;
  };
  EXPECT_EQ(code(~std::uint64_t{0}, kHeaderLimit), ErrorCode::limit);
  EXPECT_EQ(code(kHeaderLimit + 1, kHeaderLimit), ErrorCode::limit);
  EXPECT_EQ(code(1000, kHeaderLimit), ErrorCode::incomplete);
  EXPECT_EQ(code(12, 11), ErrorCode::limit);
  for (std::size_t size = 0; size < 8; ++size) {
    const auto [found, threw] =
        test::thrown([&] { (void)read_header(*test::source(std::vector<std::byte>(size))); });
    EXPECT_TRUE(threw && found == ErrorCode::incomplete) << size;
  }
}

TEST(SafetensorsRead, SurvivesDamage) {
  const auto parse = [](std::vector<std::byte> bytes) {
    (void)read_header(*test::source(std::move(bytes)));
  };
  EXPECT_THAT(test::damage(test::golden("dtypes.safetensors"), 3000, parse), testing::IsEmpty());
}

}  // namespace
}  // namespace tessera::safetensors
