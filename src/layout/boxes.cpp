#include "layout/boxes.h"

#include <algorithm>
#include <utility>

#include "tessera/error.h"

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

Box bounds_of(const Slice& slice, const Shape& shape) {
  if (numel(slice) == 0)
    throw Error(ErrorCode::invalid_argument, "a slice without elements has no bounds");
  if (const Box* box = std::get_if<Box>(&slice)) {
    require_inside(slice, shape);
    return *box;
  }
  const std::vector<Box> parts = boxes_of(std::get<FlatRange>(slice), shape);
  Box bounds = parts.front();
  for (const Box& part : parts) {
    for (std::size_t d = 0; d < shape.size(); ++d) {
      const std::int64_t end =
          std::max(bounds.offsets[d] + bounds.sizes[d], part.offsets[d] + part.sizes[d]);
      bounds.offsets[d] = std::min(bounds.offsets[d], part.offsets[d]);
      bounds.sizes[d] = end - bounds.offsets[d];
    }
  }
  return bounds;
}

bool is_row_of_slices(const Shape& shape, std::size_t count, const BoxRow& row) {
  const std::size_t dimensions = shape.size();
  if (count == 0 || dimensions == 0) return false;
  const auto first = row(0);
  std::size_t cut = 0;
  while (cut + 1 < dimensions && first[dimensions + cut] == shape[cut]) ++cut;
  std::int64_t end = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto here = row(i);
    for (std::size_t d = 0; d < dimensions; ++d) {
      if (d != cut && (here[d] != 0 || here[dimensions + d] != shape[d])) return false;
    }
    if (here[cut] != end || here[dimensions + cut] > shape[cut] - end) return false;
    end += here[dimensions + cut];
  }
  return end == shape[cut];
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

namespace {

// Does not overflow where the product of both would.
std::int64_t part_begin(const Placement& placement, std::int64_t count, int part) {
  const std::int64_t reach = placement.begin + count;
  const std::int64_t before =
      part > reach / placement.shard ? reach : placement.shard * std::int64_t{part};
  return std::clamp<std::int64_t>(before - placement.begin, 0, count);
}

}  // namespace

bool fits(const Placement& placement, const Shape& shape, int ranks) {
  if (placement.parts < 1 || placement.stride < 1) return false;
  if (placement.parts > ranks / placement.stride) return false;
  if (placement.parts == 1) return true;
  if (placement.shard == 0)
    return placement.dim >= 0 && static_cast<std::size_t>(placement.dim) < shape.size();
  if (placement.shard < 0 || placement.begin < 0) return false;
  // The last part reaches the tensor's end.
  const std::int64_t count = numel(shape);
  return part_begin(placement, count, placement.parts) == count;
}

std::vector<Box> boxes_of_part(const Placement& placement, const Shape& shape, int part) {
  const std::int64_t count = numel(shape);
  if (placement.parts == 1 || count == 0)
    return part == 0 ? std::vector<Box>{whole(shape)} : std::vector<Box>();
  if (placement.shard > 0) {
    return boxes_of({part_begin(placement, count, part), part_begin(placement, count, part + 1)},
                    shape);
  }
  Box box = chunk_of(whole(shape), static_cast<std::size_t>(placement.dim), placement.parts, part);
  if (numel(box) == 0) return {};
  return {std::move(box)};
}

std::int64_t elements_of_part(const Placement& placement, const Shape& shape, int part) {
  const std::int64_t count = numel(shape);
  if (placement.parts == 1 || count == 0) return part == 0 ? count : 0;
  if (placement.shard > 0)
    return part_begin(placement, count, part + 1) - part_begin(placement, count, part);
  const std::int64_t size = shape[static_cast<std::size_t>(placement.dim)];
  const std::int64_t slices =
      chunk_begin(size, placement.parts, part + 1) - chunk_begin(size, placement.parts, part);
  return slices * (count / size);
}

}  // namespace tessera
