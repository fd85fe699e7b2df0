#include "tessera/tensor_view.h"

#include <gtest/gtest.h>

#include <array>

#include "conformance/errors.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// What is const is saved, never loaded into.
static_assert(std::is_convertible_v<TensorView, ConstTensorView>);
static_assert(!std::is_convertible_v<ConstTensorView, TensorView>);
template <class Pointer>
concept Writable = requires(Pointer data) {
  TensorView::of(data, DType::float32, Shape{1}, Shape{});
};
static_assert(Writable<float*> && !Writable<const float*>);

TEST(TensorView, IsRowMajorUnlessStridesSayOtherwise) {
  std::array<float, 6> memory{};
  const auto view = TensorView::of(memory.data(), DType::float32, {2, 3});
  EXPECT_EQ(view.strides(), Shape({3, 1}));
  const auto transposed = TensorView::of(memory.data(), DType::float32, {3, 2}, {1, 3});
  const auto part = transposed.part({{1, 1}, {2, 1}});
  EXPECT_EQ(part.data(), reinterpret_cast<std::byte*>(&memory[4]));
  EXPECT_EQ(part.shape(), Shape({2, 1}));
  EXPECT_EQ(part.strides(), Shape({1, 3}));
  EXPECT_EQ(TensorView::of(memory.data(), DType::float32, {}).shape(), Shape());
}

TEST(TensorView, EveryElementLiesInTheMemory) {
  std::array<std::byte, 24> memory{};
  EXPECT_NO_THROW((void)TensorView::of(memory, DType::float32, {2, 3}));
  EXPECT_NO_THROW((void)TensorView::of(memory, DType::float32, {2, 2}, {4, 1}));
  EXPECT_NO_THROW((void)TensorView::of(memory, DType::float32, {0, 100}, {9, 9}));
  const auto refused = [&](Shape shape, Shape strides) {
    EXPECT_EQ(code_of([&] {
                (void)ConstTensorView::of(ByteView(memory), DType::float32, std::move(shape),
                                          std::move(strides));
              }),
              ErrorCode::invalid_argument);
  };
  refused({7}, {});
  refused({2, 3}, {4, 1});
  refused({2}, {1, 1});
  refused({2}, {-1});
  refused({-2}, {});
  EXPECT_EQ(code_of([] { (void)TensorView::of(nullptr, DType::int8, {1}); }),
            ErrorCode::invalid_argument);
  EXPECT_NO_THROW((void)ConstTensorView::of(nullptr, DType::int8, {0}));
  const auto view = TensorView::of(memory, DType::float32, {2, 3});
  EXPECT_EQ(code_of([&] { (void)view.part({{1, 0}, {2, 3}}); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { (void)view.part({{0}, {1}}); }), ErrorCode::invalid_argument);
}

TEST(TensorView, AsALeafHoldsItsElements) {
  std::array<std::int32_t, 6> memory{0, 1, 2, 3, 4, 5};
  const auto view = TensorView::of(memory.data(), DType::int32, {2, 2}, {3, 1});
  const Tensor to = view.tensor();
  EXPECT_EQ(to.pieces.at(0).storage->data, reinterpret_cast<std::byte*>(memory.data()));
  EXPECT_EQ(to.pieces.at(0).storage->size, 20U);  // to the end of the last element
  EXPECT_EQ(to.pieces.at(0).strides, Shape({3, 1}));
  const ConstTensorView& fixed = view;
  const Tensor from = fixed.tensor();
  EXPECT_EQ(from.pieces.at(0).storage->data, nullptr);
  std::int32_t last = 0;
  from.pieces.at(0).storage->source->read_at(16, std::as_writable_bytes(std::span(&last, 1)));
  EXPECT_EQ(last, 4);
}

}  // namespace
}  // namespace tessera
