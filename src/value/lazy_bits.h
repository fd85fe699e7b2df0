// torch's lazy bits of tensors, resolved.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tessera/value.h"

namespace tessera {

// Makes `count` elements as `piece`'s storage holds them, of type `dtype` and one behind the other,
// those that the piece stands for: conjugates, negatives, or both. Without a bit nothing happens.
// Twice gives the first elements again. Throws `unsupported` for negatives of types that torch
// cannot negate.
void resolve_bits(const Piece& piece, DType dtype, std::byte* elements, std::int64_t count);

}  // namespace tessera
