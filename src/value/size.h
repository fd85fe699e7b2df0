// torch.Size as data.
#pragma once

#include <optional>

#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera {

// The sizes that `value` stands for: a tuple or list of integers, or an object torch.Size((...)).
// None when it is something else or a number leaves 64 bits.
[[nodiscard]] std::optional<Shape> size_from(const Value& value);

// The object torch.Size((...)).
[[nodiscard]] Value size_object(const Shape& shape);

}  // namespace tessera
