// How one element of a tensor is named in an Error.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/layout.h"

namespace tessera {

// "element [1, 2] of a tensor of shape [4, 4]" for global position 6. The position lies inside.
[[nodiscard]] inline std::string element_name(const Shape& shape, std::int64_t global) {
  Shape index(shape.size(), 0);
  for (std::size_t d = shape.size(); d-- > 0;) {
    index[d] = global % shape[d];
    global /= shape[d];
  }
  return "element " + to_string(index) + " of a tensor of shape " + to_string(shape);
}

}  // namespace tessera
