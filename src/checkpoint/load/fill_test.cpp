#include "checkpoint/load/fill.h"

#include <cmath>
#include <complex>
#include <limits>

#include <gmock/gmock.h>

#include "checkpoint/read/cast.h"
#include "checkpoint/test_support.h"
#include "conformance/fake_device.h"
#include "tessera/restore.h"

namespace tessera {

// What is left in the memory of a load that has failed (fault-rows R19).

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::Each;
using ::testing::HasSubstr;

Error spoiled_by_reading(const Value& tree) {
  return spoiled(tree, Error(ErrorCode::corrupt, "a test").while_doing("reading"));
}

// Two elements of one type, set to zero.
Tensor zeros(DType dtype) {
  Tensor tensor;
  tensor.dtype = dtype;
  tensor.shape = {2};
  tensor.pieces.push_back({whole({2}), memory(2 * size_of(dtype)), 0, {}, -1});
  return tensor;
}

template <typename Element>
std::vector<Element> elements(const Tensor& tensor) {
  const auto* data = reinterpret_cast<const Element*>(tensor.pieces[0].storage->data);
  return {data, data + 2};
}

TEST(Spoiled, FloatingPointElementsOfAnyTypeAreNaN) {
  for (const DTypeInfo& info : dtype_table()) {
    if (!info.floating || info.dtype == DType::float4_e2m1fn_x2) continue;
    SCOPED_TRACE(info.torch);
    const Tensor tensor = zeros(info.dtype);
    (void)spoiled_by_reading(Value::dict({{"t", Value(tensor)}}));
    const std::byte* held = tensor.pieces[0].storage->data;
    double wide[2] = {};
    if (is_small_float(info.dtype)) {
      const auto values = float8_values(info.dtype);
      for (int i = 0; i < 2; ++i) wide[i] = values.at(std::to_integer<std::size_t>(held[i]));
    } else {
      cast(info.dtype, held, DType::float64, reinterpret_cast<std::byte*>(wide), 2);
    }
    EXPECT_TRUE(std::isnan(wide[0]) && std::isnan(wide[1]));
  }
  const Tensor complex = zeros(DType::complex64);
  (void)spoiled_by_reading(Value::dict({{"t", Value(complex)}}));
  EXPECT_TRUE(std::isnan(elements<std::complex<float>>(complex)[1].imag()));
}

template <typename Element>
void expect_extreme(DType dtype, Element extreme) {
  SCOPED_TRACE(to_string(dtype));
  const Tensor tensor = zeros(dtype);
  const Error error = spoiled_by_reading(Value::list({Value(tensor)}));
  EXPECT_THAT(elements<Element>(tensor), Each(extreme));
  EXPECT_STREQ(error.what(),
               "corrupt: a test (reading, after which all that it was to fill is NaN or, of "
               "integers, an extreme)");
}

TEST(Spoiled, IntegersAreExtremes) {
  expect_extreme(DType::int8, std::numeric_limits<std::int8_t>::min());
  expect_extreme(DType::int16, std::numeric_limits<std::int16_t>::min());
  expect_extreme(DType::int32, std::numeric_limits<std::int32_t>::min());
  expect_extreme(DType::int64, std::numeric_limits<std::int64_t>::min());
  expect_extreme(DType::uint8, std::numeric_limits<std::uint8_t>::max());
  expect_extreme(DType::uint64, std::numeric_limits<std::uint64_t>::max());
  expect_extreme(DType::bool8, std::uint8_t{1});
}

// A column of a matrix, and more bytes than are written at once.
TEST(Spoiled, OnlyThePiecesOwnElementsAreOverwritten) {
  constexpr std::int64_t kRows = 40'000;
  std::vector<float> matrix(static_cast<std::size_t>(kRows * 2), 1.0F);
  const TensorView column = TensorView::of(matrix.data() + 1, DType::float32, {kRows}, {2});
  (void)spoiled_by_reading(Value::dict({{"t", Value(column.tensor())}}));
  for (std::size_t i = 0; i < matrix.size(); ++i) ASSERT_EQ(std::isnan(matrix[i]), i % 2 == 1) << i;
  Tensor rows = TensorView::of(matrix.data(), DType::float32, {kRows, 2}).tensor();
  rows.shape = {kRows + 2, 2};
  rows.pieces[0].slice = Box{{1, 0}, {kRows, 2}};
  matrix.assign(matrix.size(), 1.0F);
  (void)spoiled_by_reading(Value::dict({{"t", Value(rows)}}));
  for (const float element : matrix) ASSERT_TRUE(std::isnan(element));
}

// Every other element, in more runs than are written at once.
TEST(Spoiled, MemoryOfADeviceIsOverwritten) {
  constexpr std::int64_t kCount = 2'000;
  FakeDevice device;
  std::vector<float> floats(kCount * 2, 1.0F);
  Tensor tensor = TensorView::of(floats.data(), DType::float32, {kCount}, {2}).tensor();
  auto storage = std::make_shared<Storage>();
  storage->size = floats.size() * sizeof(float);
  storage->device = std::make_shared<FakeMemory>(
      device, MutableByteView(reinterpret_cast<std::byte*>(floats.data()), storage->size));
  tensor.pieces[0].storage = storage;
  const Value tree = Value::dict({{"t", Value(tensor)}});
  (void)spoiled_by_reading(tree);
  for (std::size_t i = 0; i < floats.size(); ++i) ASSERT_EQ(std::isnan(floats[i]), i % 2 == 0) << i;
  // Memory that cannot be written is said, and what lies behind it is overwritten.
  const Tensor host = zeros(DType::float32);
  device.fail(1);
  const Error error = spoiled_by_reading(Value::list({Value(tensor), Value(host)}));
  EXPECT_THAT(error.what(), HasSubstr("what it was to fill is undefined, and cannot be "
                                      "overwritten: io: the fake device failed to copy"));
  EXPECT_TRUE(std::isnan(elements<float>(host)[1]));
}

// A piece that lies on another rank.
TEST(Spoiled, WhatOtherRanksHoldIsLeftToThem) {
  Tensor elsewhere = zeros(DType::float32);
  elsewhere.pieces[0].storage = nullptr;
  const Tensor own = zeros(DType::float32);
  (void)spoiled_by_reading(Value::list({Value(elsewhere), Value(own)}));
  EXPECT_TRUE(std::isnan(elements<float>(own)[1]));
}

}  // namespace
}  // namespace tessera
