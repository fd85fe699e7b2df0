#include "format/olmo/yaml.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "format/test_support.h"
#include "value/render.h"

namespace tessera::olmo {

// Rows Y01 to Y08 of what hostile YAML may not do, and the scalars of OLMo's own loader.

namespace {

ByteView view(const std::string& text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

Value parse(const std::string& text) {
  return parse_yaml(view(text));
}

void expect_refused(ErrorCode code, const std::string& text) {
  const auto [found, refused] = test::thrown([&] { (void)parse(text); });
  EXPECT_TRUE(refused) << text.substr(0, 80);
  EXPECT_EQ(to_string(found), to_string(code)) << text.substr(0, 80);
}

std::string repeat(const std::string& part, int times) {
  std::string text;
  for (int i = 0; i < times; ++i) text += part;
  return text;
}

TEST(Yaml, ReadsWhatOlmoWrites) {
  const Value config = parse(
      "run_name: test\nmodel:\n  d_model: 64\n  mlp_ratio: 4.5\n  names: [a, 'b c']\n"
      "empty: null\nlist:\n- 1\n- x: {y: 2}\nquoted: '012'\nlong: >\n  two\n  lines\n"
      "sharded_checkpointer: torch_legacy\n");
  EXPECT_EQ(render(config, 1000),
            "{'run_name': 'test', 'model': {'d_model': 64, 'mlp_ratio': 4.5, 'names': ['a', 'b "
            "c']}, 'empty': None, 'list': [1, {'x': {'y': 2}}], 'quoted': '012', 'long': 'two "
            "lines\\n', 'sharded_checkpointer': 'torch_legacy'}");
  EXPECT_EQ(parse("").kind(), Value::Kind::none);
}

TEST(Yaml, Y01AliasBombs) {
  std::string bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n";
  for (int i = 1; i < 9; ++i) {
    const std::string ref = "*a" + std::to_string(i - 1);
    bomb += "a" + std::to_string(i) + ": &a" + std::to_string(i) + " [" + ref +
            repeat(", " + ref, 8) + "]\n";
  }
  expect_refused(ErrorCode::limit, bomb);
  expect_refused(ErrorCode::corrupt, "a: &a [1, *a]\n");
  expect_refused(ErrorCode::corrupt, "a: *nothing\n");
  EXPECT_EQ(render(parse("a: &a [1, 2]\nb: *a\n")), "{'a': [1, 2], 'b': [1, 2]}");
}

TEST(Yaml, Y02DeepNesting) {
  expect_refused(ErrorCode::limit, repeat("[", 100000));
  expect_refused(ErrorCode::limit, repeat("{a: ", 100000));
  expect_refused(ErrorCode::limit, repeat("- ", 100000) + "x");
  std::string indented;
  for (int i = 0; i < 2000; ++i) indented += std::string(static_cast<std::size_t>(i), ' ') + "a:\n";
  expect_refused(ErrorCode::limit, indented);
  EXPECT_EQ(parse(repeat("[", 100) + repeat("]", 100)).size(), 1U);
  expect_refused(ErrorCode::limit, repeat("[", 101) + repeat("]", 101));
}

TEST(Yaml, Y03Tags) {
  expect_refused(ErrorCode::unsafe, "a: !!python/object/apply:os.system [ls]\n");
  expect_refused(ErrorCode::unsafe, "a: !!python/tuple [1]\n");
  expect_refused(ErrorCode::unsafe, "!!python/name:os.system x\n");
  expect_refused(ErrorCode::unsupported, "a: !mine 1\n");
  expect_refused(ErrorCode::unsupported, "a: !!binary aGk=\n");
  expect_refused(ErrorCode::unsupported, "a: !!set {a, b}\n");
  expect_refused(ErrorCode::corrupt, "a: !!int abc\n");
  EXPECT_EQ(render(parse("[!!str 12, !!int \"12\", !!float 1, !!bool \"yes\", !!null \"\"]")),
            "['12', 12, 1.0, True, None]");
}

TEST(Yaml, Y04DuplicateKeys) {
  expect_refused(ErrorCode::corrupt, "a: 1\nb: 2\na: 3\n");
  expect_refused(ErrorCode::corrupt, "{1: a, 1: b}");
  expect_refused(ErrorCode::corrupt, "[a]: 1\n");
  expect_refused(ErrorCode::unsupported, "a: 1\n<<: {b: 2}\n");
}

TEST(Yaml, Y05Y06ScalarsAreTypedAsOlmosLoaderDoes) {
  const std::vector<std::byte> table = test::golden("yaml_scalars.json");
  std::size_t rows = 0;
  for (const auto& row : nlohmann::json::parse(table)) {
    const std::string word = row[0].get<std::string>();
    EXPECT_EQ(render(parse("k: " + word + "\n").at("k"), 1000), row[2].get<std::string>()) << word;
    ++rows;
  }
  EXPECT_EQ(rows, 95U);
  const auto [code, refused] =
      test::thrown([] { (void)parse("k: 0x" + std::string(17, 'f') + "\n"); });
  EXPECT_TRUE(refused && code == ErrorCode::limit);
  // PyYAML's rule takes them for integers, and then fails.
  expect_refused(ErrorCode::corrupt, "k: 0b_\n");
  expect_refused(ErrorCode::corrupt, "k: 0x__\n");
}

TEST(Yaml, Y07EncodingsDocumentsAndSizes) {
  expect_refused(ErrorCode::corrupt, "a:\n\tb: 1\n");
  expect_refused(ErrorCode::corrupt,
                 "\xef\xbb\xbf"
                 "a: 1\n");
  expect_refused(ErrorCode::corrupt, std::string("\xff\xfe"
                                                 "a\0:\0",
                                                 6));
  expect_refused(ErrorCode::corrupt, std::string("a\0: 1\n", 6));
  expect_refused(ErrorCode::corrupt, "a: \xff\n");
  expect_refused(ErrorCode::corrupt, "a: 1\n---\nb: 1\n");
  expect_refused(ErrorCode::corrupt, "a: [1\n");
  expect_refused(ErrorCode::limit, "a: " + repeat(std::string(1000, 'x'), 100'000));
  EXPECT_EQ(render(parse("---\na: b\t\n...\n")), "{'a': 'b'}");
}

TEST(Yaml, Y08WorldSize) {
  const auto size = [](const std::string& text) { return world_size_of(view(text)); };
  EXPECT_EQ(size("world_size: 8\n"), 8);
  for (const char* text : {"world_size: -1\n", "world_size: 0\n", "world_size: 1000000000\n",
                           "world_size: 8.0\n", "world_size: '8'\n", "world_size: true\n",
                           "world_size: 99999999999999999999999\n", "worldsize: 8\n", "8\n", ""}) {
    const auto [code, refused] = test::thrown([&] { (void)size(text); });
    EXPECT_TRUE(refused && code == ErrorCode::corrupt) << text;
  }
}

TEST(Yaml, TheCheckpointerOfAConfig) {
  const auto name = [](const std::string& text) { return sharded_checkpointer_of(view(text)); };
  EXPECT_EQ(name("a: 1\nsharded_checkpointer: torch_new\n"), "torch_new");
  EXPECT_EQ(name("a: 1\n"), std::nullopt);
  EXPECT_EQ(name("sharded_checkpointer: 5\n"), std::nullopt);
}

}  // namespace
}  // namespace tessera::olmo
