// Whether all ranks of a save have the same state, outside of the trainer's (checkpoint-rows
// OQ-09).
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/together/placed.h"
#include "tessera/comm.h"

namespace tessera {

// What else has to be the same, by names.
using NamedDigests = std::vector<std::pair<std::string, std::uint64_t>>;

// Of all that is no tensor, and of `more`.
[[nodiscard]] std::uint64_t digest_of_values(const OlmoState& state, const NamedDigests& more);

// Where digests differ: throws on all ranks `mismatch`, naming all that ranks do not have alike.
// Collective.
void refuse_difference(const OlmoState& state, const NamedDigests& more,
                       const PlacedTensors& tensors, Group& group);

}  // namespace tessera
