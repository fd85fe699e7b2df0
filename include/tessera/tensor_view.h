// Tensors in memory that somebody else owns: where a read goes to, what a save takes.
#pragma once

#include <cstddef>
#include <memory>

#include "tessera/dtype.h"
#include "tessera/io.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera {

// A tensor whose elements may be read. The memory outlives the view and everything made from it.
class ConstTensorView {
 public:
  // `strides` in elements, one a dimension; empty: row-major. `invalid_argument` for negative sizes
  // or strides, another number of strides, or no memory where there are elements. Where `memory` is
  // given with its size every element is proved to lie in it: `invalid_argument` with both numbers.
  [[nodiscard]] static ConstTensorView of(const void* data, DType dtype, Shape shape,
                                          Shape strides = {});
  [[nodiscard]] static ConstTensorView of(ByteView memory, DType dtype, Shape shape,
                                          Shape strides = {});

  [[nodiscard]] const std::byte* data() const noexcept { return data_; }
  [[nodiscard]] DType dtype() const noexcept { return dtype_; }
  [[nodiscard]] const Shape& shape() const noexcept { return shape_; }
  // Elements; one a dimension, also where none were given.
  [[nodiscard]] const Shape& strides() const noexcept { return strides_; }

  // The elements in `box`; `invalid_argument` when it is not inside of the shape.
  [[nodiscard]] ConstTensorView part(const Box& box) const;
  // A leaf for a tree that is saved. A load into it is `invalid_argument`.
  [[nodiscard]] Tensor tensor() const;

 private:
  friend class TensorView;
  ConstTensorView(const void* data, DType dtype, Shape shape, Shape strides);

  const std::byte* data_;  // of the first element; null where there are none
  DType dtype_;
  Shape shape_;
  Shape strides_;
};

// The same where elements may be written, too.
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
