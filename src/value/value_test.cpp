#include "tessera/value.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tessera/error.h"
#include "value/hash.h"
#include "value/integer.h"
#include "value/size.h"

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

}  // namespace
}  // namespace tessera
