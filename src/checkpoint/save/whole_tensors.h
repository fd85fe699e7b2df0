// The tensors that a rank holds whole, for a save that keeps what other ranks hold of them.
#pragma once

#include <stop_token>
#include <vector>

#include "checkpoint/save/copies.h"
#include "checkpoint/save/planned_leaf.h"
#include "tessera/leaf.h"

namespace tessera {

// A rank's leaves, and the chunks that it holds of each.
struct HeldLeaves {
  const std::vector<Leaf>& leaves;
  const std::vector<std::vector<HeldChunk>>& chunks;
};

// Those that it holds in one piece, with digests of all their bytes. Tensors of another dtype or
// shape have other keys: they are no copies of one another. The lowest rank's copy counts as
// written. `threads` read; throws `cancelled` when `stop` is requested.
[[nodiscard]] std::vector<HeldCopy> whole_tensors(const HeldLeaves& held, int threads,
                                                  const std::stop_token& stop);

// A message of 8 bytes that is the same on ranks which hold the same; those of ranks that do not
// combine to an empty one.
[[nodiscard]] Bytes digest_message(const std::vector<HeldCopy>& copies);
[[nodiscard]] Bytes combine_same(const Bytes& left, const Bytes& right);

}  // namespace tessera
