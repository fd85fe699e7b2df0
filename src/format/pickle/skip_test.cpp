// SkipRule: lists of plain objects are read as empty ones, and nothing else changes (F-04).
#include <gtest/gtest.h>

#include <array>

#include "format/pickle/pickle.h"
#include "format/test_support.h"

namespace tessera::pickle {
namespace {

constexpr std::array<std::string_view, 2> kClasses = {"shard Shard", "torch device"};
constexpr std::array<SkipRule::Attribute, 2> kLists = {
    {{"shard Whole", "shards"}, {"shard Spec", "placements"}}};
constexpr std::uint64_t kItems = 40;

ReadOptions skipping() {
  ReadOptions options;
  options.skip = SkipRule{kLists, kClasses};
  return options;
}

Value device() {
  return Value::object(
      {.callable = Value::global("torch", "device"), .arguments = Value::tuple({Value("cpu")})});
}

Value shard(std::int64_t row, const Value& cls = Value::global("shard", "Shard")) {
  Object object{.callable = cls, .arguments = Value::tuple(), .by_new = true};
  object.state =
      Value::tuple({Value(), Value::dict({{"offsets", Value::list({Value(row), Value(0)})},
                                          {"rank", Value(std::int64_t{1} << 40)},
                                          {"device", device()}})});
  return Value::object(std::move(object));
}

Value list_of_shards(const Value& cls = Value::global("shard", "Shard")) {
  Value::List items;
  for (std::uint64_t i = 0; i < kItems; ++i) {
    items.push_back(shard(static_cast<std::int64_t>(i) * 300, cls));
  }
  return Value::list(std::move(items));
}

Value instance(const char* name, const char* attribute, Value list) {
  Object object{
      .callable = Value::global("shard", name), .arguments = Value::tuple(), .by_new = true};
  object.state = Value::dict({{attribute, std::move(list)}, {"size", Value(7)}});
  return Value::object(std::move(object));
}

Value whole(Value list) {
  return instance("Whole", "shards", std::move(list));
}

Value tree_of(Value list, Value after) {
  return Value::dict({{"first", whole(std::move(list))}, {"after", std::move(after)}});
}

const Value& list_in(const Value& tree) {
  return tree.at("first").as_object().state->at("shards");
}

TEST(PickleSkip, AListOfTheRuleIsReadAsAnEmptyOne) {
  const auto bytes = write(tree_of(list_of_shards(), "text"));
  const Parsed parsed = read(bytes, skipping());
  EXPECT_EQ(parsed.consumed, bytes.size());
  EXPECT_EQ(parsed.value, tree_of(Value::list(), "text"));
  EXPECT_EQ(list_in(read(bytes).value).size(), kItems);
}

TEST(PickleSkip, WhatIsSkippedMayBeReferredToFromOutside) {
  const Value list = list_of_shards();
  const auto bytes = write(tree_of(list, Value::tuple({list.items()[3], list.items()[30]})));
  const Value read_back = read(bytes, skipping()).value;
  EXPECT_EQ(read_back, tree_of(Value::list(), Value::tuple({list.items()[3], list.items()[30]})));
}

// The second list mentions what the first one defined, and is skipped all the same.
TEST(PickleSkip, ListsMayReferToEachOther) {
  const Value cls = Value::global("shard", "Shard");
  const Value first = list_of_shards(cls);
  const auto tree = [&](const Value& one, const Value& two) {
    return Value::dict({{"a", whole(one)},
                        {"b", whole(two)},
                        {"c", instance("Spec", "placements", one)},
                        {"shared", first.items()[1]}});
  };
  const auto bytes = write(tree(first, list_of_shards(cls)));
  const Value read_back = read(bytes, skipping()).value;
  EXPECT_EQ(read_back.at("a"), whole(Value::list()));
  EXPECT_EQ(read_back.at("b"), whole(Value::list()));
  EXPECT_EQ(read_back.at("shared"), first.items()[1]);
}

TEST(PickleSkip, OtherListsAreReadAsUsual) {
  for (const Value& list :
       {list_of_shards(Value::global("other", "Shard")), Value::list({Value(1.5), Value(2)}),
        Value::list({Value("\u00e9"), Value(2)}), Value::list({Value::set({Value(1)}), Value(2)}),
        Value::list({shard(1)})}) {
    const auto bytes = write(tree_of(list, "text"));
    EXPECT_EQ(read(bytes, skipping()).value, tree_of(list, "text"));
  }
  // A list of shards that no object has, and one in an attribute of another name.
  const Value others =
      Value::tuple({Value::dict({{"shards", list_of_shards()}, {"size", Value(7)}}),
                    instance("Whole", "others", list_of_shards())});
  EXPECT_EQ(read(write(others), skipping()).value, others);
}

TEST(PickleSkip, ProtocolFourIsReadAsUsual) {
  WriteOptions four;
  four.protocol = 4;
  const auto bytes = write(tree_of(list_of_shards(), "text"), four);
  EXPECT_EQ(read(bytes, skipping()).value, tree_of(list_of_shards(), "text"));
}

// A call of something dangerous is refused inside such a list too.
TEST(PickleSkip, DangerousCallsAreRefused) {
  const Value call = Value::object(
      {.callable = Value::global("os", "system"), .arguments = Value::tuple({Value("true")})});
  for (const Value& before : {Value("nothing"), Value::global("os", "system")}) {
    const Value& callable = before.is(Value::Kind::global) ? before : call.as_object().callable;
    const Value list = Value::list(
        {shard(1),
         Value::object({.callable = callable, .arguments = Value::tuple({Value("true")})})});
    const auto bytes = write(Value::dict({{"before", before}, {"in", whole(list)}}));
    const auto [code, threw] = test::thrown([&] { (void)read(bytes, skipping()); });
    ASSERT_TRUE(threw);
    EXPECT_EQ(code, ErrorCode::unsafe);
  }
}

// A damaged pickle that still reads reads as the same with and without skipping: the rest of the
// tree is not touched by what is skipped.
TEST(PickleSkip, DamageNeverReadsAsSomethingElse) {
  const auto good = write(tree_of(list_of_shards(), "text"));
  int refused = 0;
  int compared = 0;
  for (std::size_t at = 2; at < good.size(); at += 3) {
    auto bytes = good;
    bytes[at] ^= std::byte{4};
    Value plain;
    const auto [code, threw] = test::thrown([&] { plain = read(bytes).value; });
    Value skipped;
    const auto [skip_code, skip_threw] =
        test::thrown([&] { skipped = read(bytes, skipping()).value; });
    refused += threw ? 1 : 0;
    if (threw) continue;  // in what is skipped only the form is checked
    ASSERT_FALSE(skip_threw) << at;
    const Value* after = plain.find("after");
    if (after == nullptr) continue;
    ++compared;
    EXPECT_EQ(*after, skipped.at("after")) << at;
  }
  EXPECT_GT(refused, 0);
  EXPECT_GT(compared, 0);
}

}  // namespace
}  // namespace tessera::pickle
