// Which leaves of a checkpoint no rank has taken: messages of ranks that a fold combines.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/comm.h"
#include "tessera/leaf.h"

namespace tessera {

// `untaken`: positions in `leaves`, ascending, of those that this rank has not taken. `refused`:
// whether it refuses to load when there are leaves that no rank takes.
[[nodiscard]] Bytes untaken_message(const std::vector<Leaf>& leaves,
                                    const std::vector<std::size_t>& untaken, bool refused);

// The leaves that neither has taken. Associative; see Combine.
[[nodiscard]] Bytes combine_untaken(Bytes left, Bytes right);

// Those of this rank's `untaken` that no rank has taken, by the message of all ranks. Where the
// ranks' checkpoints have other names or another order of leaves, it is this rank's own list.
[[nodiscard]] std::vector<std::size_t> untaken_by_all(const Bytes& message,
                                                      std::vector<std::size_t> untaken);

// Whether the ranks' leaves have other names or another order.
[[nodiscard]] bool names_differ(const Bytes& message);

// Whether one of the ranks refuses.
[[nodiscard]] bool any_refuses(const Bytes& message);

}  // namespace tessera
