#include "tessera/numpy_array.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>
#include <vector>

#include "value/render.h"

namespace tessera {
namespace {

Value bytes_of(const std::vector<int>& bytes) {
  std::vector<std::byte> made;
  made.reserve(bytes.size());
  for (const int byte : bytes) made.push_back(static_cast<std::byte>(byte));
  return Value::bytes(std::move(made));
}

Value dtype_object(const char* code, const char* order) {
  return Value::object({.callable = Value::global("numpy", "dtype"),
                        .arguments = Value::tuple({code, false, true}),
                        .state = Value::tuple({3, order, Value(), Value(), Value(), -1, -1, 0})});
}

Value reconstructed_object(Value dtype, Value shape, Value by_columns, Value bytes) {
  return Value::object({.callable = Value::global("numpy._core.multiarray", "_reconstruct"),
                        .arguments = Value::tuple({Value::global("numpy", "ndarray"),
                                                   Value::tuple({0}), bytes_of({'b'})}),
                        .state = Value::tuple({1, std::move(shape), std::move(dtype),
                                               std::move(by_columns), std::move(bytes)})});
}

Value scalar_object(const char* code, const char* order, const std::vector<int>& bytes) {
  return Value::object({.callable = Value::global("numpy.core.multiarray", "scalar"),
                        .arguments = Value::tuple({dtype_object(code, order), bytes_of(bytes)})});
}

Value buffer_object(const char* order, Value shape, const std::vector<int>& bytes) {
  return Value::object({.callable = Value::global("numpy._core.numeric", "_frombuffer"),
                        .arguments = Value::tuple(
                            {bytes_of(bytes), dtype_object("i1", "|"), std::move(shape), order})});
}

TEST(NumpyArray, RowsColumnsAndOrdersOfBytes) {
  const Value rows = reconstructed_object(dtype_object("i2", "<"), Value::tuple({2, 1}), false,
                                          bytes_of({1, 0, 2, 0}));
  const auto array = numpy_array(rows);
  ASSERT_TRUE(array);
  EXPECT_EQ(array->tensor.dtype, DType::int16);
  EXPECT_EQ(array->tensor.shape, (Shape{2, 1}));
  EXPECT_FALSE(array->is_scalar);
  EXPECT_EQ(render(rows), "array([[1], [2]], dtype=int16)");
  EXPECT_EQ(render(reconstructed_object(dtype_object("i2", ">"), Value::tuple({2}), false,
                                        bytes_of({1, 0, 2, 0}))),
            "array([256, 512], dtype=int16)");
  EXPECT_EQ(render(reconstructed_object(dtype_object("u1", "|"), Value::tuple({2, 3}), true,
                                        bytes_of({1, 2, 3, 4, 5, 6}))),
            "array([[1, 3, 5], [2, 4, 6]], dtype=uint8)");
  EXPECT_EQ(render(buffer_object("F", Value::tuple({2, 2}), {1, 2, 3, 4})),
            "array([[1, 3], [2, 4]], dtype=int8)");
  // Its two halves are turned around, not the whole.
  EXPECT_EQ(render(scalar_object("c8", ">", {0x3f, 0x80, 0, 0, 0x40, 0, 0, 0})),
            "np.complex64(1+2j)");
}

// Memory of (2, 3, 1), of which numpy.transpose((1, 2, 0)) is the array.
TEST(NumpyArray, AnyOrderOfDimensions) {
  const auto with_axes = [](Value axes) {
    Value made = buffer_object("K", Value::tuple({2, 3, 1}), {1, 2, 3, 4, 5, 6});
    made.as_object().arguments.items().push_back(std::move(axes));
    return made;
  };
  const Value array = with_axes(Value::tuple({1, 2, 0}));
  ASSERT_TRUE(numpy_array(array));
  EXPECT_EQ(numpy_array(array)->tensor.shape, (Shape{3, 1, 2}));
  EXPECT_EQ(render(array), "array([[[1, 4]], [[2, 5]], [[3, 6]]], dtype=int8)");
  for (const Value& axes : {Value::tuple({1, 2}), Value::tuple({1, 2, 1}), Value::tuple({1, 2, 3}),
                            Value::tuple({1, 2, -1}), Value::tuple({1, 2, false}),
                            Value::tuple({1, 2, 0, 0}), Value::list({1, 2, 0}), Value()})
    EXPECT_FALSE(numpy_array(with_axes(axes))) << render(axes);
}

TEST(NumpyArray, WithoutDimensionsAndWithoutElements) {
  const Value one =
      reconstructed_object(dtype_object("b1", "|"), Value::tuple({}), false, bytes_of({1}));
  EXPECT_EQ(render(one), "array(True)");
  const Value none =
      reconstructed_object(dtype_object("f8", "<"), Value::tuple({0, 3}), true, bytes_of({}));
  EXPECT_EQ(render(none), "array([], shape=(0, 3), dtype=float64)");
  EXPECT_EQ(numpy_array(none)->tensor.shape, (Shape{0, 3}));
}

TEST(NumpyArray, ScalarsAreWrittenAsShortAsTheirTypeAllows) {
  EXPECT_EQ(render(scalar_object("f2", "<", {0x66, 0x2e})), "np.float16(0.1)");
  EXPECT_EQ(render(scalar_object("f4", "<", {0xcd, 0xcc, 0xcc, 0x3d})), "np.float32(0.1)");
  EXPECT_EQ(render(scalar_object("f8", ">", {0x3f, 0xf8, 0, 0, 0, 0, 0, 0})), "np.float64(1.5)");
  EXPECT_EQ(render(scalar_object("f4", "<", {0, 0, 0x80, 0xff})), "np.float32(-inf)");
  EXPECT_EQ(render(scalar_object("f4", "<", {0, 0, 0, 0x80})), "np.float32(-0.0)");
  EXPECT_EQ(render(scalar_object("b1", "|", {1})), "np.True_");
  EXPECT_EQ(render(scalar_object("u8", "<", std::vector<int>(8, 255))),
            "np.uint64(18446744073709551615)");
  EXPECT_EQ(key_text(scalar_object("i1", "|", {255})), "-1");
}

TEST(NumpyArray, LongOnesAreCut) {
  const Value large = reconstructed_object(dtype_object("i1", "|"), Value::tuple({1 << 20}), false,
                                           Value::bytes(std::vector<std::byte>(1 << 20)));
  EXPECT_LE(render(large, 50).size(), 60U);
  const Value wide = reconstructed_object(
      dtype_object("i1", "|"), Value::tuple({std::int64_t{1} << 40, 0}), false, bytes_of({}));
  EXPECT_EQ(render(wide, 200), "array([], shape=(1099511627776, 0), dtype=int8)");
}

TEST(NumpyArray, WhatDoesNotFitIsNone) {
  const auto none = [](const Value& value) { EXPECT_FALSE(numpy_array(value)) << render(value); };
  const Value f4 = dtype_object("f4", "<");
  const Value four = bytes_of({0, 0, 0, 0});
  const std::int64_t huge = std::int64_t{1} << 62;
  none(reconstructed_object(f4, Value::tuple({2}), false, four));
  none(reconstructed_object(f4, Value::tuple({-1}), false, four));
  none(reconstructed_object(f4, Value::tuple({huge, huge}), false, bytes_of({})));
  none(reconstructed_object(f4, Value::tuple({huge, huge, 0}), false, bytes_of({})));
  none(reconstructed_object(f4, Value::tuple({huge}), false, bytes_of({})));
  none(reconstructed_object(f4, Value::tuple({true}), false, four));
  none(reconstructed_object(f4, Value(1), false, four));
  none(reconstructed_object(f4, Value::tuple(Value::List(65, 1)), false, four));
  none(reconstructed_object(f4, Value::tuple({1}), 0, four));
  none(reconstructed_object(f4, Value::tuple({1}), false, Value::list({1})));
  none(reconstructed_object(f4, Value::tuple({1}), false, "four"));
  none(reconstructed_object(dtype_object("f4", "|"), Value::tuple({1}), false, four));
  none(reconstructed_object(dtype_object("f4", "?"), Value::tuple({1}), false, four));
  none(reconstructed_object(dtype_object("f3", "<"), Value::tuple({1}), false, four));
  none(reconstructed_object(dtype_object("O8", "|"), Value::tuple({0}), false, Value::list({})));
  none(reconstructed_object(dtype_object("U1", "<"), Value::tuple({1}), false, four));
  none(reconstructed_object(dtype_object("M8", "<"), Value::tuple({0}), false, bytes_of({})));
  none(reconstructed_object("f4", Value::tuple({1}), false, four));
  none(scalar_object("f4", "<", {0}));
  none(scalar_object("f4", "<", {}));
  none(buffer_object("K", Value::tuple({1}), {1}));
  none(Value::object(
      {.callable = Value::global("numpy", "load"), .arguments = Value::tuple({"x"})}));
  Value matrix = reconstructed_object(f4, Value::tuple({1}), false, four);
  matrix.as_object().arguments =
      Value::tuple({Value::global("numpy", "matrix"), Value::tuple({0}), bytes_of({'b'})});
  none(matrix);
  Value twice = reconstructed_object(f4, Value::tuple({1}), false, four);
  twice.as_object().list_items = {1};
  none(twice);
}

}  // namespace
}  // namespace tessera
