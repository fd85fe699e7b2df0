// A digest that is equal for equal values, on every machine.
#pragma once

#include <cstdint>
#include <functional>

#include "tessera/value.h"

namespace tessera {

// `of_elements`: a digest of a tensor's elements; the rest of the tensor is digested here. As for
// ==, the order of dicts and sets and the sharing of nodes do not count. Throws as
// require_walkable (depth.h) does.
[[nodiscard]] std::uint64_t digest_of(
    const Value& value, const std::function<std::uint64_t(const Tensor&)>& of_elements);

}  // namespace tessera
