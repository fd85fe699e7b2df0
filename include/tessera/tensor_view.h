// Tensors in memory that somebody else owns: what a read fills, and what a save takes.
#pragma once

#include <cstddef>
#include <memory>

#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace [[gnu::visibility("default")]] tessera {

// A tensor whose elements may be read. Its memory must outlive the view and everything made from
// it.
class ConstTensorView {
 public:
  // `strides` counts elements, one per dimension; empty: row-major. Throws `invalid_argument` for
  // negative sizes or strides, a wrong number of strides, or no memory although there are elements.
  // If `memory` has a size, every element must lie in it: else `invalid_argument` names both
  // numbers.
  [[nodiscard]] static ConstTensorView of(const void* data, DType dtype, Shape shape,
                                          Shape strides = {});
  [[nodiscard]] static ConstTensorView of(ByteView memory, DType dtype, Shape shape,
                                          Shape strides = {});

  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  // In elements, one per dimension, also if none were given.
  [[nodiscard]] const Shape& strides() const noexcept { return strides_; }

  // The elements in `box`. Throws `invalid_argument` if the box reaches outside the shape.
  [[nodiscard]] ConstTensorView part(const Box& box) const;
  // A leaf for a tree that is saved. Loading into it is `invalid_argument`.
  [[nodiscard]] Tensor tensor() const;

 private:
  friend class TensorView;
  ConstTensorView(const void* data, DType dtype, Shape shape, Shape strides);

  const std::byte* data_;  // of the first element; null where there are none
  DType dtype_;
  Shape shape_;
  Shape strides_;
};

// The same for elements that may also be written.
class TensorView : public ConstTensorView {
 public:
  [[nodiscard]] static TensorView of(void* data, DType dtype, Shape shape, Shape strides = {});
  [[nodiscard]] static TensorView of(MutableByteView memory, DType dtype, Shape shape,
                                     Shape strides = {});

  [[nodiscard]] std::byte* data() const noexcept { return const_cast<std::byte*>(data_); }
  [[nodiscard]] TensorView part(const Box& box) const;
  // A leaf for a tree that is loaded into, or saved.
  [[nodiscard]] Tensor tensor() const;

 private:
  explicit TensorView(ConstTensorView view) : ConstTensorView(std::move(view)) {}
};

}  // namespace tessera
