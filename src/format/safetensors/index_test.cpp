// The index of a set of safetensors files: reliability J01, J04 to J06.
#include "format/safetensors/index.h"

#include <gtest/gtest.h>

#include "format/test_support.h"

namespace tessera::safetensors {
namespace {

ByteView view(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

ErrorCode code(const std::string& text) {
  const auto [found, any] = test::thrown([&] { (void)read_index(view(text)); });
  EXPECT_TRUE(any) << "was read: " << text.substr(0, 80);
  return found;
}

std::string map_of(const std::string& content) {
  return R"({"metadata": {"total_size": 8}, "weight_map": {)" + content + "}}";
}

TEST(SafetensorsIndex, ReadsWhatPyTorchWrote) {
  const auto bytes = test::golden("c2_hf_cons/model.safetensors.index.json");
  const Index index = read_index(bytes);
  EXPECT_EQ(index.files.size(), 7U);
  EXPECT_EQ(index.files.at("s0"), "model-00001-of-00002.safetensors");
  EXPECT_EQ(index.total_size, 176U);
}

TEST(SafetensorsIndex, KeepsNamesAndSkipsWhatItDoesNotKnow) {
  const Index index = read_index(view(
      R"({"weight_map": {"\u00e9\n": "a.safetensors"}, "x": [1, {"weight_map": {"a": 1}}], "y": null})"));
  EXPECT_EQ(index.files, (std::map<std::string, std::string>{{"\xc3\xa9\n", "a.safetensors"}}));
  EXPECT_EQ(index.total_size, std::nullopt);
}

TEST(SafetensorsIndex, J01FileNamesThatLeaveTheDirectory) {
  for (const char* name :
       {"../x", "/etc/passwd", "a/b.safetensors", "a\\\\b", "C:x", "", ".", "..", "x\\u0000y"}) {
    EXPECT_EQ(code(map_of(R"("w": ")" + std::string(name) + "\"")), ErrorCode::unsafe) << name;
  }
}

TEST(SafetensorsIndex, J04Depth) {
  const std::string deep(100'000, '[');
  EXPECT_EQ(code(R"({"x": )" + deep), ErrorCode::limit);
}

TEST(SafetensorsIndex, J05WhatIsNotAnIndex) {
  for (const std::string& text :
       {map_of(R"("w": "a", "w": "b")"), map_of(R"("w": 1)"), map_of(R"("w": null)"),
        map_of(R"("w": {})"), map_of(R"("w": ["a"])"), std::string(R"({"weight_map": []})"),
        std::string(R"({"weight_map": 1})"), std::string("{}"), std::string("[]"), std::string("1"),
        std::string(), map_of("") + "x", map_of(R"("w": "a",)"), map_of("\"\xff\": \"a\""),
        std::string(R"({"weight_map": {}, "weight_map": {}})")}) {
    EXPECT_EQ(code(text), ErrorCode::corrupt) << text;
  }
}

TEST(SafetensorsIndex, J06AMillionNames) {
  Index index;
  for (int i = 0; i < 1'000'000; ++i) {
    index.files.emplace_hint(index.files.end(), std::to_string(1'000'000 + i), "a.safetensors");
  }
  EXPECT_EQ(read_index(view(encode_index(index))).files.size(), 1'000'000U);
}

// json.dumps(..., indent=2, sort_keys=True) + "\n"
TEST(SafetensorsIndex, IsWrittenAsPythonWouldWriteIt) {
  Index index;
  index.total_size = 12;
  index.files = {{"b\"\x7f", "x"}, {"a\xf0\x9f\x99\x82\xc3\xa9", "y"}};
  EXPECT_EQ(encode_index(index),
            "{\n  \"metadata\": {\n    \"total_size\": 12\n  },\n  \"weight_map\": {\n"
            "    \"a\\ud83d\\ude42\\u00e9\": \"y\",\n    \"b\\\"\\u007f\": \"x\"\n  }\n}\n");
  EXPECT_EQ(read_index(view(encode_index(index))).files, index.files);
  EXPECT_EQ(encode_index({}), "{\n  \"metadata\": {},\n  \"weight_map\": {}\n}\n");
}

TEST(SafetensorsIndex, DamageIsRefusedOrRead) {
  const auto bytes = test::golden("c2_hf_cons/model.safetensors.index.json");
  const auto accepted =
      test::damage(bytes, 2000, [](std::vector<std::byte> input) { (void)read_index(input); });
  EXPECT_TRUE(accepted.empty());
}

}  // namespace
}  // namespace tessera::safetensors
