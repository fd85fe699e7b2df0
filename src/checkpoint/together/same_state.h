// Whether all ranks of a save have the same state, outside of the trainer's (checkpoint-rows
// OQ-09).
#pragma once

#include <cstdint>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/together/placed.h"
#include "tessera/comm.h"

namespace tessera {

// Of all that is no tensor.
[[nodiscard]] std::uint64_t digest_of_values(const OlmoState& state);

// Where digests differ: throws on all ranks `mismatch`, naming the first thing that ranks do not
// have alike. Collective.
void refuse_difference(const OlmoState& state, const PlacedTensors& tensors, Group& group);

}  // namespace tessera
