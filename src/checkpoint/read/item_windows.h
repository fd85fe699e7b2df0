// A compressed item of DCP, decompressed once from its first byte to its last.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "tessera/job.h"
#include "tessera/value.h"

namespace tessera {

// The tensor, of which only the elements of one window are here, in memory.
using VisitWindow = std::function<void(const Tensor& window)>;

// Goes over all elements of `piece`, a compressed item of `tensor`, by windows of at most `window`
// bytes in the order of the file. What the item's directory says stands behind the elements, so it
// is compared when they have been visited, and their CRC-32 too: a difference is `corrupt`. Adds
// to `report` what was read. `name` is for errors.
//
// Returns false and visits nothing where the item does not begin as torch.save begins the file of a
// tensor with elements of its own: then only its directory can tell where these are.
[[nodiscard]] bool visit_item(const Tensor& tensor, const Piece& piece, const std::string& name,
                              std::size_t window, const VisitWindow& visit, IoReport& report);

}  // namespace tessera
