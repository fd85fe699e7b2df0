// Proof that the memory is there which a caller's tree speaks of.
#pragma once

#include <string>

#include "tessera/value.h"

namespace tessera {

// Each throws `invalid_argument`, naming `key` and both numbers, for a tensor whose shape has a
// negative size or one of whose pieces is not inside the shape, has strides that are not its own
// (not one a dimension, negative), or reaches beyond its storage on either side, or whose storage
// is nowhere.

// Pieces may be read. What other ranks hold (no storage) is left out.
void require_readable(const Tensor& tensor, const std::string& key);
// Pieces are in memory and may be written: no two elements of one have one place.
void require_writable(const Tensor& tensor, const std::string& key);

// The strides of a piece's own array.
[[nodiscard]] Shape strides_of(const Piece& piece);

}  // namespace tessera
