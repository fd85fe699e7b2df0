#include "value/equality.h"

#include <limits>
#include <set>

#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera {
namespace {

std::uint64_t digest(const Value& value) {
  return digest_of(
      value, [](const Tensor& tensor) { return static_cast<std::uint64_t>(tensor.pieces.size()); });
}

TEST(ValueDigest, DifferentValuesDiffer) {
  Tensor tensor;
  tensor.shape = {2};
  Tensor other = tensor;
  other.shape = {1, 2};
  Tensor half = tensor;
  half.dtype = DType::float16;
  Tensor filled = tensor;
  filled.pieces.resize(1);
  const std::vector<Value> values{
      Value(),
      Value(true),
      Value(1),
      Value(1.0),
      Value("1"),
      Value(-1),
      Value(0.0),
      Value(-0.0),
      Value(std::uint64_t{1} << 63U),
      Value::complex({1, 0}),
      Value::complex({0, 1}),
      Value::bytes({std::byte{1}}),
      Value::bytearray({std::byte{1}}),
      Value::list(),
      Value::tuple(),
      Value::set(),
      Value::frozenset(),
      Value::dict(),
      Value::list({1, 2}),
      Value::list({2, 1}),
      Value::list({Value::list({1}), 2}),
      Value::tuple({1, 2}),
      Value::dict({{"a", 1}}),
      Value::dict({{"a", 2}}),
      Value::dict({{1, "a"}}),
      Value::global("a", "b"),
      Value::global("ab", ""),
      Value::object({Value::global("a", "b"), Value::tuple({1})}),
      Value::object({Value::global("a", "b"), Value::tuple({1}), false, {}, Value(1)}),
      Value(tensor),
      Value(other),
      Value(half),
      Value(filled)};
  std::set<std::uint64_t> digests;
  for (const Value& value : values) digests.insert(digest(value));
  EXPECT_EQ(digests.size(), values.size());
}

TEST(ValueDigest, EqualOnesAreEqualHoweverTheyWereMade) {
  EXPECT_EQ(digest(Value::dict({{"a", 1}, {"b", 2}})), digest(Value::dict({{"b", 2}, {"a", 1}})));
  EXPECT_EQ(digest(Value::set({1, 2})), digest(Value::set({2, 1})));
  const Value text("x");
  EXPECT_EQ(digest(Value::list({text, text})), digest(Value::list({"x", "x"})));
}

// A value of 2^60 paths, and one that contains itself.
TEST(ValueDigest, SharedNodesAreDigestedOnce) {
  Value deep = Value::list({1});
  for (int i = 0; i < 60; ++i) deep = Value::list({deep, deep});
  EXPECT_NE(digest(deep), 0U);
  Value cycle = Value::list({1});
  cycle.items().push_back(cycle);
  EXPECT_EQ(code_of([&] { (void)digest(cycle); }), ErrorCode::invalid_argument);
  cycle.items().clear();
}

}  // namespace
}  // namespace tessera
