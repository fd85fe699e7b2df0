#include "tessera/tensor_view.h"

#include <utility>

#include "base/numbers.h"
#include "io/source.h"
#include "layout/strided.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// Bytes from the first element to the end of the last.
std::uint64_t bytes_of(DType dtype, const Shape& shape, const Shape& strides) {
  const auto elements = static_cast<std::uint64_t>(strided_reach(shape, strides));
  return checked_mul<std::uint64_t>(elements, size_of(dtype));
}

void require_in(ByteView memory, const ConstTensorView& view) {
  const std::uint64_t needed = bytes_of(view.dtype(), view.shape(), view.strides());
  if (needed <= memory.size()) return;
  throw Error(ErrorCode::invalid_argument, "a tensor reaches to byte " + std::to_string(needed) +
                                               " of a memory of " + std::to_string(memory.size()) +
                                               " bytes");
}

Tensor tensor_of(const ConstTensorView& view, std::shared_ptr<Storage> storage) {
  storage->size = bytes_of(view.dtype(), view.shape(), view.strides());
  storage->dtype = view.dtype();
  Tensor tensor;
  tensor.dtype = view.dtype();
  tensor.shape = view.shape();
  tensor.pieces.push_back({whole(view.shape()), std::move(storage), 0, view.strides(), -1});
  return tensor;
}

void require_sizes(const Shape& shape) {
  for (const std::int64_t size : shape) {
    if (size < 0) throw Error(ErrorCode::invalid_argument, "negative size in " + to_string(shape));
  }
}

}  // namespace

ConstTensorView::ConstTensorView(const void* data, DType dtype, Shape shape, Shape strides)
    : data_(static_cast<const std::byte*>(data)),
      dtype_(dtype),
      shape_(std::move(shape)),
      strides_(std::move(strides)) {
  require_sizes(shape_);
  if (strides_.empty()) strides_ = contiguous_strides(shape_);
  if (bytes_of(dtype_, shape_, strides_) > 0 && data_ == nullptr)
    throw Error(ErrorCode::invalid_argument,
                "no memory for a tensor of shape " + to_string(shape_));
}

ConstTensorView ConstTensorView::of(const void* data, DType dtype, Shape shape, Shape strides) {
  return {data, dtype, std::move(shape), std::move(strides)};
}

ConstTensorView ConstTensorView::of(ByteView memory, DType dtype, Shape shape, Shape strides) {
  ConstTensorView view(memory.data(), dtype, std::move(shape), std::move(strides));
  require_in(memory, view);
  return view;
}

ConstTensorView ConstTensorView::part(const Box& box) const {
  try {
    require_inside(box, shape_);
  } catch (const Error& error) {
    throw Error(ErrorCode::invalid_argument, error.message());
  }
  if (numel(box.sizes) == 0) return {data_, dtype_, box.sizes, strides_};
  std::size_t first = 0;  // elements
  for (std::size_t d = 0; d < shape_.size(); ++d)
    first += static_cast<std::size_t>(box.offsets[d] * strides_[d]);
  return {data_ + first * size_of(dtype_), dtype_, box.sizes, strides_};
}

Tensor ConstTensorView::tensor() const {
  auto storage = std::make_shared<Storage>();
  const auto size = static_cast<std::size_t>(bytes_of(dtype_, shape_, strides_));
  storage->source = borrowed_source(ByteView(data_, size), "memory");
  return tensor_of(*this, std::move(storage));
}

TensorView TensorView::of(void* data, DType dtype, Shape shape, Shape strides) {
  return TensorView(ConstTensorView(data, dtype, std::move(shape), std::move(strides)));
}

TensorView TensorView::of(MutableByteView memory, DType dtype, Shape shape, Shape strides) {
  return TensorView(
      ConstTensorView::of(ByteView(memory), dtype, std::move(shape), std::move(strides)));
}

TensorView TensorView::part(const Box& box) const {
  return TensorView(ConstTensorView::part(box));
}

Tensor TensorView::tensor() const {
  static constinit std::byte nothing{};
  auto storage = std::make_shared<Storage>();
  storage->data = data() != nullptr ? data() : &nothing;  // an empty tensor's own memory
  return tensor_of(*this, std::move(storage));
}

}  // namespace tessera
