// Arrays with strides, in elements.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/layout.h"

namespace tessera {

// Elements between the first of an array with these sizes and strides and one past its last: 0 when
// it has none. Throws `invalid_argument` when sizes and strides are not equally many or one of them
// is negative.
[[nodiscard]] std::int64_t strided_reach(const Shape& sizes, const Shape& strides);

// Calls `visit(position, count)` for the maximal runs of `count` elements with stride 1 that make
// up elements [begin, begin + count) (row-major) of an array with these sizes and strides;
// `position` is the element offset from the array's first element.
void for_each_strided_run(
    const Shape& sizes, const Shape& strides, std::int64_t begin, std::int64_t count,
    const std::function<void(std::int64_t position, std::int64_t count)>& visit);

}  // namespace tessera
