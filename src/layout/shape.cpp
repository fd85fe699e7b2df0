#include <algorithm>

#include "base/checked.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// Whether `size` slices from `begin` on are among the `limit` of a dimension.
bool fits(std::int64_t begin, std::int64_t size, std::int64_t limit) {
  return begin >= 0 && size >= 0 && begin <= limit && size <= limit - begin;
}

bool is_inside(const Box& box, const Shape& shape) {
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (!fits(box.offsets[d], box.sizes[d], shape[d])) return false;
  }
  return true;
}

bool is_inside(const FlatRange& range, const Shape& shape) {
  return range.begin >= 0 && range.end >= range.begin && range.end <= numel(shape);
}

void require_no_negative_size(const Shape& shape) {
  if (std::ranges::any_of(shape, [](std::int64_t size) { return size < 0; })) {
    throw Error(ErrorCode::corrupt, "negative size in shape " + to_string(shape));
  }
}

}  // namespace

std::int64_t numel(const Shape& shape) {
  require_no_negative_size(shape);
  // A zero size makes the product zero whatever the others are, so look for it before multiplying.
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product = checked_mul(product, size);
  return product;
}

std::uint64_t byte_size(DType dtype, const Shape& shape) {
  return checked_mul<std::uint64_t>(static_cast<std::uint64_t>(numel(shape)), size_of(dtype));
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(shape[d]);
  }
  return text + "]";
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride = checked_mul(stride, std::max<std::int64_t>(shape[d], 1));
  }
  return strides;
}

Box whole(const Shape& shape) {
  return Box{Shape(shape.size(), 0), shape};
}

std::int64_t numel(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) return numel(box->sizes);
  const FlatRange& range = std::get<FlatRange>(slice);
  return checked_sub(range.end, range.begin);
}

std::string to_string(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) {
    return to_string(box->sizes) + " at " + to_string(box->offsets);
  }
  const FlatRange& range = std::get<FlatRange>(slice);
  return "elements " + std::to_string(range.begin) + " to " + std::to_string(range.end);
}

void require_inside(const Slice& slice, const Shape& shape) {
  const bool inside =
      std::visit([&shape](const auto& part) { return is_inside(part, shape); }, slice);
  if (!inside) {
    throw Error(ErrorCode::corrupt, "slice " + to_string(slice) +
                                        " is not inside a tensor of shape " + to_string(shape));
  }
}

}  // namespace tessera
