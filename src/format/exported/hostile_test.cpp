// Archives of torch.export that are damaged or hostile: reliability A13 to A32.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "format/exported/config.h"
#include "format/exported/exported.h"
#include "format/exported/testing.h"
#include "format/test_support.h"
#include "format/torch/torch_file.h"
#include "value/render.h"

namespace tessera::exported {
namespace {

using test::entry;
using test::records;
using test::Text;

struct Refusal {
  ErrorCode code = ErrorCode::invalid_argument;
  std::string key;
  std::string path;
};

Refusal refusal_of(const Text& archive) {
  try {
    (void)read(tessera::test::source(test::archive_of(archive)));
  } catch (const Error& error) {
    return {error.code(), error.key(), error.path()};
  }
  ADD_FAILURE() << "it was read";
  return {};
}

// That an entry of this text is refused, by its name and with the file's; as a weight, and as a
// constant of the record that these have.
void expect_refused(const std::string& text, ErrorCode code) {
  std::string constant = text;
  if (const std::size_t at = text.find("\"weight_0\""); at != std::string::npos)
    constant.replace(at, 10, "\"tensor_0\"");
  for (const Text& archive : {records(R"("w": )" + text), records("", R"("w": )" + constant)}) {
    const Refusal refusal = refusal_of(archive);
    EXPECT_EQ(refusal.code, code) << text.substr(0, 500);
    EXPECT_EQ(refusal.key, "w") << text.substr(0, 500);
    EXPECT_THAT(refusal.path, ::testing::HasSubstr("bytes under test"));
  }
}

void replace(Text& archive, const std::string& record, const std::string& content) {
  for (auto& [name, held] : archive)
    if (name == record) held = content;
}

Text without(Text archive, const std::string& record) {
  std::erase_if(archive, [&](const auto& one) { return one.first == record; });
  return archive;
}

TEST(ExportedHostile, A13RecordsThatLeaveTheirFolder) {
  for (const char* name :
       {"..", ".", "", "/etc/passwd", "../weights/weight_0", "a/b", "a\\\\b", "weight_0\\u0000"})
    expect_refused(entry("\"weight_0\"", "\"" + std::string(name) + "\""), ErrorCode::unsafe);
}

TEST(ExportedHostile, A14RecordsThatAreMissing) {
  expect_refused(entry("weight_0", "weight_9"), ErrorCode::corrupt);
  expect_refused(entry("weight_0", "model_weights_config"), ErrorCode::corrupt);
}

TEST(ExportedHostile, A15NumbersBelowZero) {
  expect_refused(entry("{\"as_int\": 2}", "{\"as_int\": -2}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 1}", "{\"as_int\": -1}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 0}", "{\"as_int\": -1}"), ErrorCode::corrupt);
}

TEST(ExportedHostile, A16NumbersThatOverflow) {
  for (const char* size : {"4611686018427387904", "9223372036854775807"}) {
    const std::string number = "{\"as_int\": " + std::string(size) + "}";
    for (const std::string& text :
         {entry("{\"as_int\": 2}", number), entry("{\"as_int\": 1}", number),
          entry("{\"as_int\": 0}", number)}) {
      const Refusal refusal = refusal_of(records(R"("w": )" + text));
      EXPECT_THAT(refusal.code, ::testing::AnyOf(ErrorCode::corrupt, ErrorCode::limit)) << text;
      EXPECT_EQ(refusal.key, "w");
    }
  }
  expect_refused(entry("{\"as_int\": 2}", "{\"as_int\": 9223372036854775808}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 2}", "{\"as_int\": 2.0}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 2}", "{\"as_int\": 1e400}"), ErrorCode::corrupt);
}

TEST(ExportedHostile, A17TensorsPastTheirStorage) {
  expect_refused(entry("{\"as_int\": 2}", "{\"as_int\": 3}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 0}", "{\"as_int\": 1}"), ErrorCode::corrupt);
  expect_refused(entry("{\"as_int\": 1}", "{\"as_int\": 2}"), ErrorCode::corrupt);
}

TEST(ExportedHostile, A18DtypesThatTorchDoesNotHave) {
  for (const char* number : {"0", "14", "27", "36", "-7", "4294967303"})
    expect_refused(entry("\"dtype\": 7", "\"dtype\": " + std::string(number)),
                   ErrorCode::unsupported);
  for (const char* other : {"\"FLOAT\"", "7.0", "null", "[7]", "99999999999999999999"})
    expect_refused(entry("\"dtype\": 7", "\"dtype\": " + std::string(other)), ErrorCode::corrupt);
}

TEST(ExportedHostile, A19LayoutsThatAreNotStrided) {
  for (const char* number : {"0", "1", "6", "8"})
    expect_refused(entry("\"layout\": 7", "\"layout\": " + std::string(number)),
                   ErrorCode::unsupported);
}

TEST(ExportedHostile, A20SizesThatAreSymbols) {
  expect_refused(entry("{\"as_int\": 2}", R"({"as_expr": {"expr_str": "s0 * 2"}})"),
                 ErrorCode::unsupported);
  for (const char* form : {"2", "{}", R"({"as_int": 2, "as_expr": {}})", R"({"as_name": "s0"})",
                           R"({"as_int": "2"})", R"({"as_int": null})", "[2]"})
    expect_refused(entry("{\"as_int\": 2}", form), ErrorCode::corrupt);
}

TEST(ExportedHostile, A21MoreDimensionsThanTorchHas) {
  std::string ones = "{\"as_int\": 1}";
  for (int i = 1; i < 65; ++i) ones += ", {\"as_int\": 1}";
  std::string text = entry("{\"as_int\": 2}", ones);
  text.replace(text.find("[{\"as_int\": 1}], \"storage"), 15, "[" + ones + "]");
  expect_refused(text, ErrorCode::limit);
}

TEST(ExportedHostile, A22StridesThatAreMoreOrFewer) {
  expect_refused(entry("[{\"as_int\": 1}]", "[]"), ErrorCode::corrupt);
  expect_refused(entry("[{\"as_int\": 1}]", "[{\"as_int\": 1}, {\"as_int\": 1}]"),
                 ErrorCode::corrupt);
}

// Python takes the last of them: it would read something else.
TEST(ExportedHostile, A23NamesThatAreThereTwice) {
  const std::string one = R"("w": )" + entry();
  EXPECT_EQ(refusal_of(records(one + ", " + one)).code, ErrorCode::corrupt);
  expect_refused(entry("\"is_param\"", "\"use_pickle\": true, \"is_param\""), ErrorCode::corrupt);
  Text archive = records(one);
  replace(archive, "data/weights/model_weights_config.json",
          R"({"config": {}, "config": {)" + one + "}}");
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::corrupt);
}

TEST(ExportedHostile, A24JsonThatIsDeep) {
  const std::string deep(100'000, '[');
  expect_refused(entry("\"layout\": 7", "\"layout\": 7, \"x\": " + deep), ErrorCode::limit);
  Text archive = records("");
  replace(archive, "data/weights/model_weights_config.json", R"({"x": )" + deep);
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::limit);
}

TEST(ExportedHostile, A25JsonThatIsHuge) {
  std::string many = "0";
  for (int i = 0; i < 100'001; ++i) many += ",0";
  expect_refused(entry("\"layout\": 7", "\"layout\": 7, \"x\": [" + many + "]"), ErrorCode::limit);
  Text archive = records("");
  std::string blanks;
  blanks.resize(100'000'001, ' ');
  replace(archive, "data/weights/model_weights_config.json", blanks);
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::limit);
}

TEST(ExportedHostile, A26WhatIsNoTable) {
  for (const std::string& text :
       {std::string(), std::string("1"), std::string("[]"), std::string("{}"), std::string("null"),
        std::string(R"({"config": 1})"), std::string(R"({"config": []})"),
        std::string(R"({"config": null})"), std::string(R"({"config": {}} x)"),
        std::string(R"({"config": {},})"), std::string("{\"config\": {\"\xff\": 1}}"),
        std::string(R"({"config": {"w": NaN}})")}) {
    Text archive = records("");
    replace(archive, "data/weights/model_weights_config.json", text);
    EXPECT_EQ(refusal_of(archive).code, ErrorCode::corrupt) << text;
  }
  for (const std::string& text :
       {std::string("1"), std::string("null"), std::string("[]"), std::string("{}"),
        entry("\"path_name\"", "\"path\""), entry("false", "0"), entry("\"weight_0\"", "7"),
        entry("\"tensor_meta\": {", "\"tensor_meta\": null, \"x\": {"),
        entry("[{\"as_int\": 2}]", "{\"as_int\": 2}")})
    expect_refused(text, ErrorCode::corrupt);
}

TEST(ExportedHostile, A27RecordsOfTheWrongSize) {
  Text archive = records(R"("w": )" + entry());
  replace(archive, "data/weights/weight_0", "1234567");
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::corrupt);
  replace(archive, "data/weights/weight_0", "1234");
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::corrupt);
  replace(archive, "data/weights/weight_0", "");  // as of a tensor that torch calls fake
  const Refusal refusal = refusal_of(archive);
  EXPECT_EQ(refusal.code, ErrorCode::incomplete);
  EXPECT_EQ(refusal.key, "w");
}

TEST(ExportedHostile, A28OneRecordOfTwoDtypes) {
  const Refusal refusal = refusal_of(
      records(R"("v": )" + entry() + R"(, "w": )" + entry("\"dtype\": 7", "\"dtype\": 4")));
  EXPECT_EQ(refusal.code, ErrorCode::corrupt);
  EXPECT_EQ(refusal.key, "w");
}

TEST(ExportedHostile, A29NamesThatCollide) {
  const Refusal refusal =
      refusal_of(records(R"("w": )" + entry(), R"("w": )" + entry("weight_0", "tensor_0")));
  EXPECT_EQ(refusal.code, ErrorCode::conflict);
  EXPECT_EQ(refusal.key, "w");
}

TEST(ExportedHostile, A30ArchivesWithoutAModelAndOfOtherVersions) {
  const Text good = records(R"("w": )" + entry());
  EXPECT_EQ(refusal_of(without(good, "models/model.json")).code, ErrorCode::unsupported);
  EXPECT_EQ(refusal_of(without(good, "archive_version")).code, ErrorCode::unsupported);
  EXPECT_EQ(refusal_of(without(good, ".data/version")).code, ErrorCode::corrupt);
  for (const char* table :
       {"data/weights/model_weights_config.json", "data/constants/model_constants_config.json"})
    EXPECT_EQ(refusal_of(without(good, table)).code, ErrorCode::corrupt);
  for (const auto& [record, content] :
       {std::pair("archive_format", "pt3"), std::pair("archive_version", "1"),
        std::pair("byteorder", "big"), std::pair(".data/version", "11\n")}) {
    Text other = good;
    replace(other, record, content);
    EXPECT_EQ(refusal_of(other).code, ErrorCode::unsupported) << record;
  }
  Text compiled = without(good, "models/model.json");
  compiled.emplace_back("data/aotinductor/model/wrapper.so", "");
  EXPECT_EQ(refusal_of(compiled).code, ErrorCode::unsupported);
  Text unnamed = without(good, "models/model.json");
  unnamed.emplace_back("models/.json", "{}");
  EXPECT_EQ(refusal_of(unnamed).code, ErrorCode::corrupt);
}

TEST(ExportedHostile, A31PickledWeightsThatRunCodeOrAreNone) {
  const std::string pickled = R"("w": )" + entry("false, \"tensor_meta", "true, \"tensor_meta");
  Text archive = records(pickled);
  EXPECT_EQ(refusal_of(archive).code, ErrorCode::corrupt);
  EXPECT_EQ(refusal_of(archive).key, "w");
  replace(archive, "data/weights/weight_0",
          "\x80\x02" + std::string("cposix\nsystem\nX\x02\0\0\0id\x85R.", 24));
  EXPECT_THAT(refusal_of(archive).code,
              ::testing::AnyOf(ErrorCode::unsafe, ErrorCode::corrupt, ErrorCode::unsupported));
  // A state dict of an older archive.
  Text old = records("");
  old.emplace_back("data/weights/model.pt", "no pickle");
  EXPECT_EQ(refusal_of(old).code, ErrorCode::corrupt);
}

// Each byte, by each of two bits.
TEST(ExportedHostile, A32DamageIsAnErrorOrReadsAsItWas) {
  for (const char* name : {"net", "old"}) {
    const auto whole = tessera::test::golden(std::string("exported/") + name + ".pt2");
    const std::string as_it_was = render(read(tessera::test::source(whole))->tree, 1 << 20);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      auto bytes = whole;
      bytes[at] ^= at % 2 == 0 ? std::byte{1} : std::byte{32};
      try {
        const auto made = read(tessera::test::source(bytes));
        if (!made) continue;
        EXPECT_EQ(render(made->tree, 1 << 20), as_it_was) << name << " " << at;
      } catch (const Error&) {
        continue;
      }
    }
  }
}

}  // namespace
}  // namespace tessera::exported
