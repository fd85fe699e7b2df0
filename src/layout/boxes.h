// Boxes: of flat ranges, for formats whose chunks are boxes only and for elements at strides; in
// common; around slices; in a row; and as torch.chunk cuts them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// The range as boxes, in row-major order: the elements of one follow those of the one before. At
// most two a dimension. Throws `corrupt` when the range does not lie inside `shape`.
[[nodiscard]] std::vector<Box> boxes_of(const FlatRange& range, const Shape& shape);
// The intersection of two boxes of one tensor; none when empty.
[[nodiscard]] std::optional<Box> common_box(const Box& a, const Box& b);
// The smallest box that a slice of elements lies in. Throws as boxes_of does; a slice without
// elements is `invalid_argument`.
[[nodiscard]] Box bounds_of(const Slice& slice, const Shape& shape);

// `count` boxes of one tensor, of which number i begins at row(i)[d] and has row(i)[dims + d] of
// dimension d.
using BoxRow = std::function<std::span<const std::int64_t>(std::size_t number)>;
// Whether they cut the tensor along one dimension, one after the other: then they have every
// element once, and no other proof is needed.
[[nodiscard]] bool is_row_of_slices(const Shape& shape, std::size_t count, const BoxRow& row);

// The sizes of an array of a slice's elements: a flat range's has one dimension.
[[nodiscard]] Shape array_of(const Slice& slice);

// torch.chunk's rule: the parts of `size` slices have ceil(size / parts) each, as long as there are
// slices left.
[[nodiscard]] constexpr std::int64_t chunk_size(std::int64_t size, std::int64_t parts) noexcept {
  return size / parts + (size % parts == 0 ? 0 : 1);
}
// The first slice of part `index`; `size` when there is none left for it.
[[nodiscard]] constexpr std::int64_t chunk_begin(std::int64_t size, std::int64_t parts,
                                                 std::int64_t index) noexcept {
  return std::min(chunk_size(size, parts) * index, size);
}
// Part `index` of `box` along dimension `dim`.
[[nodiscard]] Box chunk_of(Box box, std::size_t dim, std::int64_t parts, std::int64_t index);

// The parts of a tensor that a Placement speaks of.

[[nodiscard]] constexpr int part_of_rank(const Placement& placement, int rank) noexcept {
  return rank / placement.stride % placement.parts;
}

// Whether `ranks` ranks hold all parts, and the rule fits the shape.
[[nodiscard]] bool fits(const Placement& placement, const Shape& shape, int ranks);

// The boxes that part `part` has of a tensor of `shape`, in row-major order; none where the parts
// before it have all. The parts together have every element once. A tensor without elements is
// whole in part 0. `fits` holds.
[[nodiscard]] std::vector<Box> boxes_of_part(const Placement& placement, const Shape& shape,
                                             int part);
// The elements in these boxes.
[[nodiscard]] std::int64_t elements_of_part(const Placement& placement, const Shape& shape,
                                            int part);

// How one element of a tensor is named.

// [1, 2] for global position 6 of a tensor of shape [4, 4]. The position lies inside.
[[nodiscard]] inline Shape index_at(const Shape& shape, std::int64_t global) {
  Shape index(shape.size(), 0);
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = global % shape[d];
    global /= shape[d];
  }
  return index;
}
// For an Error: "element [1, 2] of a tensor of shape [4, 4]".
[[nodiscard]] inline std::string element_name(const Shape& shape, std::int64_t global) {
  return "element " + to_string(index_at(shape, global)) + " of a tensor of shape " +
         to_string(shape);
}

}  // namespace tessera
