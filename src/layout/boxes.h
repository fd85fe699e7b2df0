// Flat ranges as boxes: for formats whose chunks are boxes only.
#pragma once

#include <vector>

#include "tessera/layout.h"

namespace tessera {

// The range as boxes, in row-major order: the elements of one follow those of the one before. At
// most two a dimension. Throws `corrupt` when the range does not lie inside `shape`.
[[nodiscard]] std::vector<Box> boxes_of(const FlatRange& range, const Shape& shape);

}  // namespace tessera
