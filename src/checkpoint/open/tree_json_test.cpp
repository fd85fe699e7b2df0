#include "checkpoint/open/tree_json.h"

#include <cfloat>
#include <cmath>
#include <random>

#include "checkpoint/open/value_json.h"
#include "checkpoint/test_support.h"
#include "format/torch/torch_file.h"

namespace tessera {

// What is written as text is what the JSON library writes of the same values (fault-rows F16).

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// Values of every kind, some within others, and trees of them.
class MadeValues {
 public:
  explicit MadeValues(unsigned seed) : random_(seed) {}

  Value scalar() {
    const double reals[] = {0,    -0.0,    1,        -1.5,      0.1,           1e300,
                            1e22, DBL_MIN, HUGE_VAL, -HUGE_VAL, -std::nan(""), std::nan("")};
    const std::int64_t integers[] = {0, -1, 7, INT64_MIN, INT64_MAX};
    switch (below(6)) {
      case 0:
        return {};
      case 1:
        return {below(2) == 0};
      case 2:
        return {integers[below(std::size(integers))]};
      case 3:
        return {reals[below(std::size(reals))]};
      case 4:
        return {std::ldexp(static_cast<double>(random_()), static_cast<int>(below(200)) - 100)};
      default:
        return {text()};
    }
  }

  Value value(int depth) {
    switch (depth == 0 ? 9 : below(9)) {
      case 0:
        return Value::list(values(depth));
      case 1:
        return Value::tuple(values(depth));
      case 2:
        return dict(depth);
      case 3:
        return Value::bytes(std::vector<std::byte>(below(5), std::byte{0x9f}));
      case 4:
        return Value::complex({1.5, -0.0});
      case 5:
        return {UINT64_MAX - below(2)};
      case 6:
        return Value::object({.callable = Value::global("m", "C"),
                              .arguments = Value::tuple(values(depth)),
                              .state = dict(depth)});
      case 7:
        return Value::frozenset({Value(1), Value(text())});
      default:
        return scalar();
    }
  }

  Value tensor() {
    Tensor tensor = counting({2}, whole({2}), 0);
    tensor.sharded = false;
    tensor.parameter = below(2) == 0;
    tensor.requires_grad = below(2) == 0;
    if (below(4) == 0)
      tensor.attributes = std::make_shared<const Value>(Value::dict({{text(), value(2)}}));
    return {std::move(tensor)};
  }

  // Dicts of any kind within dicts and lists, with tensors.
  Value tree(int depth) {
    Value made = below(4) == 0 && depth < 3 ? Value::list() : any_dict();
    for (auto left = below(5); left > 0; --left) {
      Value child = depth == 0 || below(3) == 0 ? value(2) : tree(depth - 1);
      if (below(3) == 0) child = tensor();
      if (made.is(Value::Kind::list)) {
        made.items().push_back(std::move(child));
      } else {
        made.set_item(key(), std::move(child));
      }
    }
    return made;
  }

 private:
  std::size_t below(std::size_t end) { return random_() % end; }

  std::string text() {
    const std::string texts[] = {"",     "w",     "a.b",      "quote\"d\\",   "\n\t\x01\x1f",
                                 "\x7f", "\"]},", "\xc3\xa4", "\xe2\x80\xa8", "\xf0\x9f\x98\x80"};
    return texts[below(std::size(texts))] + std::to_string(below(4));
  }

  Value key() {
    switch (below(8)) {
      case 0:
        return {below(9)};
      case 1:
        return Value::tuple({Value(text()), Value(1)});
      case 2:
        return {1.5 * static_cast<double>(below(9))};
      case 3:
        return {below(2) == 0};
      default:
        return {text()};
    }
  }

  Value::List values(int depth) {
    Value::List list(below(4));
    for (Value& item : list) item = value(depth - 1);
    return list;
  }

  Value any_dict() {
    const DictKind kinds[] = {DictKind::dict, DictKind::ordered_dict, DictKind::default_dict};
    Value made = Value::dict({}, kinds[below(3)]);
    if (made.dict_kind() == DictKind::default_dict)
      made.set_default_factory(Value::global("builtins", "list"));
    if (made.dict_kind() == DictKind::ordered_dict && below(2) == 0)
      made.set_container_state(Value::dict({{text(), value(1)}}));
    return made;
  }

  Value dict(int depth) {
    Value made = any_dict();
    for (auto left = below(4); left > 0; --left) made.set_item(key(), value(depth - 1));
    return made;
  }

  std::mt19937 random_;
};

// The schema of docs/formats/safetensors.md, as values of the library.
Json expected(const Value& value);

Json expected_items(const Value::List& items) {
  Json array = Json::array();
  for (const Value& item : items) array.push_back(expected(item));
  return array;
}

Json expected_hex(const char* tag, const std::vector<std::byte>& bytes) {
  std::string hex;
  for (const std::byte byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
    hex += digits;
  }
  return {{tag, hex}};
}

Json expected_dict(const Value& value) {
  Json pairs = Json::array();
  for (const auto& [key, item] : value.pairs())
    pairs.push_back(Json::array({expected(key), expected(item)}));
  return {{"dict", pairs}};
}

Json expected_real(const Value& value) {
  const double real = value.as_real();
  if (std::isfinite(real)) return real;
  if (!std::isnan(real)) return {{"float", real > 0 ? "inf" : "-inf"}};
  if (value == Value(std::nan(""))) return {{"float", "nan"}};
  return expected_hex("torch", torch_file::write(value, "archive"));
}

using Kind = Value::Kind;

Json expected(const Value& value) {
  const bool is_plain = value.is(Kind::dict) && value.dict_kind() == DictKind::dict &&
                        value.container_state() == nullptr;
  if (is_plain) return expected_dict(value);
  if (value.is(Kind::integer) && value.as_integer().big.empty()) return value.as_int();
  switch (value.kind()) {
    case Kind::none:
      return nullptr;
    case Kind::boolean:
      return value.as_bool();
    case Kind::string:
      return value.as_string();
    case Kind::real:
      return expected_real(value);
    case Kind::list:
      return expected_items(value.items());
    case Kind::tuple:
      return {{"tuple", expected_items(value.items())}};
    case Kind::bytes:
      return expected_hex("bytes", value.as_bytes());
    default:
      return expected_hex("torch", torch_file::write(value, "archive"));
  }
}

std::vector<Leaf> made_leaves(unsigned seed) {
  MadeValues made(seed);
  Value tree = Value::dict({{"tree", made.tree(3)}, {"more", made.tree(2)}});
  return leaves_of(tree);
}

void expect_text_of_library(const std::string& text) {
  EXPECT_EQ(text, nlohmann::ordered_json::parse(text).dump(-1, ' ', true));
}

TEST(TreeJson, ValuesAreWrittenAsByTheLibrary) {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    const Value value = MadeValues(seed).value(4);
    JsonWriter json;
    append_value(json, value);
    ASSERT_EQ(json.json(), expected(value).dump(-1, ' ', true)) << seed;
  }
}

TEST(TreeJson, TreesAreWrittenAsByTheLibraryAndComeBack) {
  for (unsigned seed = 0; seed < 500; ++seed) {
    const std::vector<Leaf> leaves = made_leaves(seed);
    const std::string types = encode_types(leaves);
    std::uint64_t values = 0;
    expect_text_of_library(types);
    expect_text_of_library(encode_tree(leaves, values));
    // Only what names and steps of text and indices do not say has to come from the text.
    std::vector<Leaf> back;
    for (const Leaf& leaf : leaves) {
      if (!is_empty_dict(leaf)) back.push_back({leaf.name, leaf.path, leaf.value});
    }
    add_types(types, back);
    ASSERT_EQ(back.size(), leaves.size()) << seed;
    EXPECT_EQ(unflatten(back), unflatten(leaves)) << seed;
    ASSERT_EQ(encode_types(back), types) << seed;
  }
}

// The order of the members, and what has none.
TEST(TreeJson, MembersStandInTheirOrder) {
  Tensor tensor = counting({2}, whole({2}), 0);
  tensor.parameter = tensor.requires_grad = true;
  Value ordered = Value::dict({{"w", Value(tensor)}, {"n", 1}}, DictKind::ordered_dict);
  ordered.set_container_state(Value::dict({{"v", 2}}));
  const std::vector<Leaf> leaves =
      leaves_of(Value::dict({{"m", ordered}, {"e", Value::dict()}, {Value(7), Value(true)}}));
  const std::string containers =
      R"("containers":[{"path":["m"],"kind":"OrderedDict","state":{"dict":[["v",2]]}}]})";
  EXPECT_EQ(
      encode_types(leaves),
      R"({"version":1,"leaves":[{"parameter":true,"requires_grad":true,"name":"m.w"},)"
      R"({"path":["e"],"value":{"dict":[]},"at":2,"name":"e"},{"path":[{"key":7}],"name":"7"}],)" +
          containers);
  std::uint64_t values = 0;
  EXPECT_EQ(encode_tree(leaves, values),
            R"({"version":2,"leaves":[{"path":["m","w"],"parameter":true,"requires_grad":true},)"
            R"({"path":["m","n"],"value":1},{"path":["e"],"value":{"dict":[]}},)"
            R"({"path":[{"key":7}],"value":true}],)" +
                containers);
  EXPECT_EQ(values, 3U);
  EXPECT_EQ(encode_types({}), R"({"version":1,"leaves":[],"containers":[]})");
}

// Lists within lists, as the entry of a safetensors file may have them.
std::string nested(std::size_t depth) {
  return R"({"version":1,"leaves":[{"path":["x"],"value":)" + std::string(depth, '[') +
         std::string(depth, ']') + "}]}";
}

TEST(TreeJson, WhatIsNestedTooDeepIsRefused) {
  const auto read = [](const std::string& text) {
    std::vector<Leaf> leaves;
    (void)add_from_metadata({{kTreeKey, text}}, leaves);
    return leaves.size();
  };
  EXPECT_EQ(read(nested(3)), 1U);
  EXPECT_EQ(code_of([&] { (void)read(nested(5000)); }), ErrorCode::limit);
  // Before it is known to be malformed.
  EXPECT_EQ(code_of([&] { (void)read(nested(5000).substr(0, 5000)); }), ErrorCode::limit);
}

TEST(TreeJson, BracketsInTextsAreNoDepth) {
  const std::string text = std::string(5000, '[') + R"("\"{)" + std::string(5000, '{');
  const Value tree = Value::dict({{text, Value(text)}, {"after", Value::list({1, 2})}});
  std::uint64_t values = 0;
  std::vector<Leaf> back;
  EXPECT_TRUE(add_from_metadata({{kTreeKey, encode_tree(leaves_of(tree), values)}}, back));
  EXPECT_EQ(unflatten(back), tree);
}

TEST(TreeJson, TextThatIsNotUtf8IsRefused) {
  const std::vector<Leaf> leaves = leaves_of(Value::dict({{"m", Value::dict({{"\xff", 1}})}}));
  std::uint64_t values = 0;
  EXPECT_EQ(code_of([&] { (void)encode_tree(leaves, values); }), ErrorCode::unsupported);
  const std::vector<Leaf> empty = leaves_of(Value::dict({{"\xff", Value::dict()}}));
  EXPECT_EQ(code_of([&] { (void)encode_types(empty); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
