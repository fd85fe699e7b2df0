#include "tessera/value.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "tessera/error.h"
#include "tessera/leaf.h"
#include "value/equality.h"
#include "value/inner_tensors.h"
#include "value/integer.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

ErrorCode code_of(const std::function<void()>& run) {
  try {
    run();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::invalid_argument;
}

TEST(Value, HandlesShareANode) {
  Value a = Value::list();
  Value b = a;
  b.items().push_back(1);
  EXPECT_EQ(a.size(), 1U);
  EXPECT_EQ(a.identity(), b.identity());
  EXPECT_NE(a.identity(), Value::list({1}).identity());
  EXPECT_EQ(a, Value::list({1}));
}

TEST(Value, WrongKindSaysWhatWasFound) {
  try {
    (void)Value("x").as_int();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_EQ(error.message(), "found a string, expected an integer");
  }
}

TEST(Value, EqualityIsByKindAndBits) {
  EXPECT_FALSE(Value(1) == Value(1.0));
  EXPECT_FALSE(Value(true) == Value(1));
  EXPECT_EQ(Value(NAN), Value(NAN));
  EXPECT_FALSE(Value(0.0) == Value(-0.0));
  EXPECT_FALSE(Value::tuple() == Value::list());
  EXPECT_FALSE(Value::tuple({1}) == Value::tuple({1, 2}));
  EXPECT_EQ(Value::set({1, 2}), Value::set({2, 1}));
  EXPECT_FALSE(Value::set({1, 2}) == Value::set({2, 2}));
}

TEST(Value, DictOrderCountsForOrderedDictOnly) {
  const auto make = [](DictKind kind, bool swap) {
    return swap ? Value::dict({{"b", 2}, {"a", 1}}, kind) : Value::dict({{"a", 1}, {"b", 2}}, kind);
  };
  EXPECT_EQ(make(DictKind::dict, false), make(DictKind::dict, true));
  EXPECT_FALSE(make(DictKind::ordered_dict, false) == make(DictKind::ordered_dict, true));
  EXPECT_FALSE(make(DictKind::dict, false) == make(DictKind::ordered_dict, false));
  EXPECT_EQ(hash_of(make(DictKind::dict, false)), hash_of(make(DictKind::dict, true)));
}

TEST(Value, LargeDictKeepsOrderAndReplaces) {
  Value dict = Value::dict();
  for (int i = 0; i < 1000; ++i) dict.set_item("key" + std::to_string(i), i);
  dict.set_item("key500", "new");
  dict.set_item(Value::tuple({1, "x"}), "tuple");
  dict.set_item(Value::tuple({1, "x"}), "again");
  ASSERT_EQ(dict.size(), 1001U);
  EXPECT_EQ(dict.pairs()[999].first.as_string(), "key999");
  EXPECT_EQ(dict.at("key500").as_string(), "new");
  EXPECT_EQ(dict.pairs()[1000].second.as_string(), "again");
  EXPECT_EQ(dict.find("absent"), nullptr);
  EXPECT_EQ(code_of([&] { (void)dict.at("absent"); }), ErrorCode::not_found);
}

TEST(Value, DeepTreesAreDestroyedWithoutRecursion) {
  Value list = Value::list();
  Value tuple;
  Value object;
  for (int i = 0; i < 300'000; ++i) {
    list = Value::list({std::move(list)});
    tuple = Value::tuple({Value::dict({{"k", std::move(tuple)}})});
    object = Value::object({.callable = Value::global("m", "n"), .arguments = {}, .state = object});
  }
}

TEST(Value, TreesAsDeepAsReadersAllowAreComparedAndFlattened) {
  const auto nested = [] {
    Value value = Value(Tensor());
    for (int i = 0; i < 1000; ++i) value = Value::list({value});
    return value;
  };
  EXPECT_EQ(nested(), nested());
  EXPECT_EQ(flatten(nested()).size(), 1U);
}

TEST(Value, ALoopOverATemporarysItemsOutlivesIt) {
  std::string text;
  for (const Value& item : Value::list({std::string(100, 'a'), std::string(100, 'b')}).items())
    text += item.as_string();
  for (const auto& [key, value] : Value::dict({{Value(std::string(100, 'c')), Value(1)}}).pairs())
    text += key.as_string();
  EXPECT_EQ(text, std::string(100, 'a') + std::string(100, 'b') + std::string(100, 'c'));
}

TEST(Value, SharedNodesDoNotMakeEqualityExplode) {
  Value a = Value::list({1});
  Value b = Value::list({1});
  for (int i = 0; i < 60; ++i) {
    a = Value::list({a, a});
    b = Value::list({b, b});
  }
  EXPECT_EQ(a, b);
  EXPECT_EQ(hash_of(a), hash_of(b));
}

TEST(Integer, NormalFormAndText) {
  for (const char* text :
       {"0", "-1", "127", "128", "-128", "-129", "255", "65536", "9223372036854775807",
        "-9223372036854775808", "9223372036854775808", "-9223372036854775809",
        "1180591620717411303424", "-340282366920938463463374607431768211456"}) {
    const Integer integer = integer_from_decimal(text);
    EXPECT_EQ(to_decimal(integer), text);
    EXPECT_EQ(integer_from_bytes(integer_to_bytes(integer)), integer) << text;
    EXPECT_EQ(to_real(integer), std::strtod(text, nullptr)) << text;
    EXPECT_EQ(integer.big.empty(), Value::integer(integer).as_integer().big.empty());
  }
  EXPECT_EQ(integer_to_bytes({-128, {}}).size(), 1U);
  EXPECT_EQ(integer_to_bytes({128, {}}).size(), 2U);
  EXPECT_EQ(code_of([] { (void)integer_from_decimal("0x10"); }), ErrorCode::corrupt);
  EXPECT_EQ(code_of([] { (void)integer_from_decimal(std::string(5000, '9')); }), ErrorCode::limit);
  EXPECT_EQ(
      code_of([] { (void)Value::integer(integer_from_decimal("9223372036854775808")).as_int(); }),
      ErrorCode::limit);
}

TEST(Value, TensorsCompareByShapeAndStrides) {
  const auto tensor = [](Shape strides) {
    Tensor made;
    made.shape = {2, 3};
    made.pieces.push_back(
        {.slice = whole(made.shape), .storage = nullptr, .strides = std::move(strides)});
    return Value(std::move(made));
  };
  EXPECT_EQ(tensor({}), tensor({3, 1}));
  EXPECT_FALSE(tensor({}) == tensor({1, 2}));
}

TEST(Size, IsReadFromWhatPythonWrites) {
  EXPECT_EQ(size_from(size_object({2, 3})), Shape({2, 3}));
  EXPECT_EQ(size_from(size_object({})), Shape());
  EXPECT_EQ(size_from(Value::list({4})), Shape({4}));
  EXPECT_EQ(size_from(Value::tuple({true})), std::nullopt);
  EXPECT_EQ(size_from(Value::tuple({Value::integer(integer_from_decimal("9223372036854775808"))})),
            std::nullopt);
  EXPECT_EQ(size_from("2"), std::nullopt);
}

// Issue 15, 7.2.
TEST(Value, ANullPointerIsNoString) {
  const char* const nothing = nullptr;
  EXPECT_EQ(code_of([&] { (void)Value(nothing); }), ErrorCode::invalid_argument);
  static_assert(!std::is_constructible_v<Value, std::nullptr_t>);
  static_assert(!std::is_constructible_v<Value, const int*>);  // would be true
}

// Issue 15, 7.6: what is asked of a temporary tree outlives it.
TEST(Value, WhatATemporaryGivesOutlivesIt) {
  const auto tree = [] {
    Tensor tensor;
    tensor.shape = {3};
    return Value::dict({{"w", tensor},
                        {"s", std::string(100, 's')},
                        {"d", Value::dict({{"x", Value::list({7})}})},
                        {"o", Value::object({.callable = Value::global("module", "name"),
                                             .arguments = Value::tuple({1})})}});
  };
  const Tensor& tensor = tree().at("w").as_tensor();
  const std::string& text = tree().at("s").as_string();
  const Value& inner = tree().at("d").at("x");
  const Object& object = tree().at("o").as_object();
  EXPECT_EQ(tensor.shape, Shape{3});
  EXPECT_EQ(text, std::string(100, 's'));
  EXPECT_EQ(inner.items()[0].as_int(), 7);
  EXPECT_EQ(object.arguments.size(), 1U);
  EXPECT_EQ(object.name(), "module.name");
}

enum class Scoped { one };
enum Unscoped { first };

// What C++ would turn into a bool or a number by itself does not become data.
template <class T>
constexpr bool kConverts = std::is_convertible_v<T, Value>;
static_assert(!std::is_constructible_v<Value, Tensor*> && !std::is_constructible_v<Value, void*>);
static_assert(!std::is_constructible_v<Value, std::nullptr_t> &&
              !std::is_constructible_v<Value, std::shared_ptr<int>>);
static_assert(!std::is_constructible_v<Value, char> && !std::is_constructible_v<Value, wchar_t> &&
              !std::is_constructible_v<Value, char16_t>);
static_assert(!std::is_constructible_v<Value, Scoped> && !std::is_constructible_v<Value, Unscoped>);
static_assert(!std::is_constructible_v<Value, int Tensor::*>);
static_assert(kConverts<bool> && kConverts<int> && kConverts<unsigned> && kConverts<long> &&
              kConverts<long long> && kConverts<std::size_t> && kConverts<std::uint8_t>);
static_assert(kConverts<float> && kConverts<double> && kConverts<const char*> &&
              kConverts<std::string> && kConverts<std::string_view> && kConverts<Tensor>);

TEST(Value, NumbersOfEveryWidthKeepTheirValue) {
  EXPECT_EQ(Value(std::size_t{7}), Value(7));
  EXPECT_EQ(Value(-3LL).as_int(), -3);
  EXPECT_EQ(Value(4'000'000'000U).as_int(), 4'000'000'000);
  EXPECT_EQ(Value(std::int8_t{-128}).as_int(), -128);
  EXPECT_EQ(Value(std::numeric_limits<std::int64_t>::max()).as_integer().big.size(), 0U);
  const Value large = std::uint64_t{1} << 63;
  EXPECT_EQ(to_decimal(large.as_integer()), "9223372036854775808");
  EXPECT_EQ(to_decimal(Value(std::numeric_limits<std::uint64_t>::max()).as_integer()),
            "18446744073709551615");
  EXPECT_EQ(Value(true).kind(), Kind::boolean);
  EXPECT_EQ(Value(0.5F).as_real(), 0.5);
  EXPECT_EQ(Value(std::string_view("text").substr(0, 2)).as_string(), "te");
}

TEST(Value, BracketsReadAndWrite) {
  Value tree = Value::dict();
  tree["model"] = Value::dict();
  tree["model"]["w"] = 1;
  tree["model"]["w"] = 2;
  tree["list"] = Value::list({1, 2});
  tree["list"][1] = "two";
  tree.at("model").at("w") = 3;
  EXPECT_EQ(tree,
            Value::dict({{"model", Value::dict({{"w", 3}})}, {"list", Value::list({1, "two"})}}));
  EXPECT_TRUE(tree["new"].is(Kind::none));
  EXPECT_EQ(tree.size(), 3U);
  const Value& same = tree;
  EXPECT_EQ(same["model"]["w"].as_int(), 3);
  EXPECT_EQ(code_of([&] { (void)same["absent"]; }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { (void)tree.at("absent"); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { (void)tree["list"][2]; }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { (void)tree["new"]["x"]; }), ErrorCode::mismatch);
  EXPECT_EQ(tree.size(), 3U);
}

// Few keys are scanned, many have an index: both ways, through the border and back.
TEST(Value, KeysAreErasedAndRenamedInPlace) {
  Value dict = Value::dict();
  const auto key = [](int i) { return "key" + std::to_string(i); };
  for (int i = 0; i < 40; ++i) dict.set_item(key(i), i);
  for (int i = 39; i >= 4; --i) {
    if (i % 3 == 0) {
      dict.rename(key(i), "renamed" + std::to_string(i));
      EXPECT_EQ(dict.at("renamed" + std::to_string(i)).as_int(), i);
      EXPECT_EQ(dict.pairs()[static_cast<std::size_t>(i)].second.as_int(), i);
      EXPECT_TRUE(dict.erase("renamed" + std::to_string(i)));
    } else {
      EXPECT_TRUE(dict.erase(key(i)));
      EXPECT_FALSE(dict.erase(key(i)));
    }
    for (int j = 0; j < i; ++j) EXPECT_EQ(dict.at(key(j)).as_int(), j);
  }
  for (int i = 4; i < 20; ++i) dict.set_item(key(i), i);
  for (int i = 0; i < 20; ++i) EXPECT_EQ(dict.at(key(i)).as_int(), i);
  dict.rename("key0", "key0");
  EXPECT_EQ(code_of([&] { dict.rename("absent", "x"); }), ErrorCode::not_found);
  EXPECT_EQ(code_of([&] { dict.rename("key1", "key2"); }), ErrorCode::conflict);
  EXPECT_EQ(dict.pairs()[1].first.as_string(), "key1");
  EXPECT_EQ(dict.size(), 20U);
}

TEST(Value, ACloneChangesAlone) {
  Tensor tensor;
  tensor.shape = {1};
  std::byte memory[4] = {};
  tensor.pieces.push_back({whole({1}), std::make_shared<Storage>(), 0, {}, -1});
  tensor.pieces[0].storage->data = memory;
  const Value shared = Value::list({tensor});
  Value tree = Value::dict({{"a", shared}, {"b", shared}});
  Value copy = tree.clone();
  EXPECT_EQ(copy, tree);
  EXPECT_EQ(copy["a"].identity(), copy["b"].identity());
  EXPECT_EQ(copy["a"][0].as_tensor().pieces[0].storage->data, memory);
  copy["a"][0].as_tensor().shape = {2};
  copy["a"].items().emplace_back(1);
  EXPECT_EQ(tree["a"].size(), 1U);
  EXPECT_EQ(tree["b"][0].as_tensor().shape, Shape{1});
  tree["a"].items().push_back(tree);
  EXPECT_EQ(code_of([&] { (void)tree.clone(); }), ErrorCode::invalid_argument);
  tree["a"].items().clear();
}

}  // namespace
}  // namespace tessera
