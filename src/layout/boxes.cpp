#include "layout/boxes.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

class Cutter {
 public:
  explicit Cutter(const Shape& shape) : shape_(shape), strides_(contiguous_strides(shape)) {}

  // Elements [begin, end) of the part of the tensor that `prefix` fixes the first dimensions of.
  void cut(Shape prefix, std::int64_t begin, std::int64_t end) {
    if (begin >= end) return;
    const auto d = prefix.size();
    if (d == shape_.size()) return add(prefix, 1);
    const auto row = strides_[d];
    const auto first = begin / row;
    if (begin % row != 0 || end - begin < row) {
      // A row that is not all there: its elements are cut one dimension further in.
      const auto limit = std::min(end, (first + 1) * row);
      auto inner = prefix;
      inner.push_back(first);
      cut(std::move(inner), begin - first * row, limit - first * row);
      return cut(std::move(prefix), limit, end);
    }
    const auto last = end / row;
    auto rows = prefix;
    rows.push_back(first);
    add(rows, last - first);
    cut(std::move(prefix), last * row, end);
  }

  std::vector<Box> boxes;

 private:
  // `count` entries of the last fixed dimension, and all of the dimensions behind it.
  void add(const Shape& prefix, std::int64_t count) {
    Box box{prefix, Shape(prefix.size(), 1)};
    if (!prefix.empty()) box.sizes.back() = count;
    box.offsets.resize(shape_.size(), 0);
    box.sizes.insert(box.sizes.end(), shape_.begin() + static_cast<std::ptrdiff_t>(prefix.size()),
                     shape_.end());
    boxes.push_back(std::move(box));
  }

  const Shape& shape_;
  Shape strides_;
};

}  // namespace

std::vector<Box> boxes_of(const FlatRange& range, const Shape& shape) {
  require_inside(range, shape);
  Cutter cutter(shape);
  cutter.cut({}, range.begin, range.end);
  return std::move(cutter.boxes);
}

std::optional<Box> common_box(const Box& a, const Box& b) {
  Box common;
  for (std::size_t d = 0; d < a.offsets.size(); ++d) {
    const std::int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    const std::int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    if (begin >= end) return std::nullopt;
    common.offsets.push_back(begin);
    common.sizes.push_back(end - begin);
  }
  return common;
}

Shape array_of(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) return box->sizes;
  return {numel(slice)};
}

Box chunk_of(Box box, std::size_t dim, std::int64_t parts, std::int64_t index) {
  const std::int64_t size = box.sizes.at(dim);
  const std::int64_t begin = chunk_begin(size, parts, index);
  box.offsets.at(dim) += begin;
  box.sizes.at(dim) = chunk_begin(size, parts, index + 1) - begin;
  return box;
}

}  // namespace tessera
