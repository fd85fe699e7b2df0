// Flat ranges as boxes: for formats whose chunks are boxes only, and for elements at strides.
#pragma once

#include <optional>
#include <vector>

#include "tessera/layout.h"

namespace tessera {

// The range as boxes, in row-major order: the elements of one follow those of the one before. At
// most two a dimension. Throws `corrupt` when the range does not lie inside `shape`.
[[nodiscard]] std::vector<Box> boxes_of(const FlatRange& range, const Shape& shape);
// What two boxes of one tensor have in common; none when nothing.
[[nodiscard]] std::optional<Box> common_box(const Box& a, const Box& b);

}  // namespace tessera
