// Equality of values that also looks into the tensors.
#pragma once

#include <functional>

#include "tessera/value.h"

namespace tessera {

// Whether two tensors of one dtype, shape and strides hold the same elements.
using SameElements = std::function<bool(const Tensor&, const Tensor&)>;

// As operator==, and all tensors that correspond to each other are `same`.
[[nodiscard]] bool equal_with_elements(const Value& a, const Value& b, const SameElements& same);

}  // namespace tessera
