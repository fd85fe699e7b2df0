#include "value/inner_tensors.h"

#include <gtest/gtest.h>

#include "value/equality.h"

namespace tessera {
namespace {

Value tensor_of(std::int64_t size) {
  Tensor tensor;
  tensor.shape = {size};
  return Value(std::move(tensor));
}

// The sizes of all tensors in `value`, by their paths.
std::string paths_in(const Value& value) {
  std::string text;
  for (const InnerTensor& inner : inner_tensors(value))
    text += inner.path + "=" + std::to_string(inner.tensor->as_tensor().shape.at(0)) + " ";
  return text;
}

TEST(InnerTensors, OfEveryContainer) {
  EXPECT_EQ(paths_in(tensor_of(1)), "");
  EXPECT_EQ(paths_in(Value::tuple({Value(1), tensor_of(2)})), ".1=2 ");
  EXPECT_EQ(paths_in(Value::dict({{Value("k"), Value::list({tensor_of(3)})}})), ".k.0=3 ");
  EXPECT_EQ(paths_in(Value::dict({{tensor_of(4), Value(1)}})), ".key=4 ");
  EXPECT_EQ(paths_in(Value::object({.callable = Value::global("a", "b"),
                                    .arguments = Value::tuple({tensor_of(5)}),
                                    .state = tensor_of(6),
                                    .list_items = {tensor_of(7)},
                                    .dict_items = {{Value("d"), tensor_of(8)}}})),
            ".state=6 .item0=7 .d=8 .arguments.0=5 ");
  Tensor with;
  with.attributes = std::make_shared<const Value>(Value::dict({{Value("grad"), tensor_of(9)}}));
  EXPECT_EQ(paths_in(Value(with)), ".attributes.grad=9 ");
}

TEST(InnerTensors, ASharedNodeComesOnce) {
  Value shared = Value::tuple({tensor_of(1)});
  // 2^40 ways to one tensor.
  for (int i = 0; i < 40; ++i) shared = Value::tuple({shared, shared});
  EXPECT_EQ(inner_tensors(shared).size(), 1U);
}

TEST(EqualWithElements, AsksForEveryPair) {
  const Value a = Value::tuple({tensor_of(1), Value::set({Value::tuple({tensor_of(2)})})});
  const Value b = Value::tuple({tensor_of(1), Value::set({Value::tuple({tensor_of(2)})})});
  EXPECT_EQ(a, b);
  std::vector<std::int64_t> asked;
  EXPECT_TRUE(equal_with_elements(a, b, [&](const Tensor& x, const Tensor&) {
    asked.push_back(x.shape.at(0));
    return true;
  }));
  EXPECT_EQ(asked, (std::vector<std::int64_t>{1, 2}));
  EXPECT_FALSE(
      equal_with_elements(a, b, [](const Tensor& x, const Tensor&) { return x.shape.at(0) != 2; }));
}

}  // namespace
}  // namespace tessera
