// What an item of DCP has to be.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/value.h"

namespace tessera {

// The most bytes that the archive of `piece`, a piece of `tensor`, may have once it is
// decompressed.
[[nodiscard]] std::uint64_t most_in_item(const Tensor& tensor, const Piece& piece);

// Throws `corrupt` when the item of `piece` turned out to hold another shape or dtype than `tensor`
// says.
void require_item(const Tensor& tensor, const Piece& piece, const Tensor& item,
                  const std::string& name);

}  // namespace tessera
