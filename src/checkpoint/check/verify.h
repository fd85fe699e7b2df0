// Copies of one part that several ranks hold, as in a hybrid mesh, compared with one another.
#pragma once

#include <cstdint>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera {

// Compares the pieces of `replica`, one of the checkpoint's `replicas`, with those that the
// checkpoint took instead. Throws `mismatch` for the first that differs, naming the tensor, the
// part and both ranks.
void require_same_copies(const Checkpoint& checkpoint, const Leaf& replica);

// Bytes of the pieces.
[[nodiscard]] std::uint64_t bytes_of(const std::vector<Leaf>& replicas);

}  // namespace tessera
