// The optimizer's state of parameters of which a rank holds nothing: with original parameters of
// FSDP1 such a rank has no gradients, makes no state and counts no steps.
#pragma once

#include "tessera/comm.h"
#include "tessera/parameter.h"
#include "tessera/value.h"

namespace tessera::detail {

// `states` ({name: {...}}, this rank's) with the entries that other ranks have, so that all ranks
// have the same leaves, sorted by names: parts without elements, and numbers of steps as the lowest
// rank that counts them says. Collective.
[[nodiscard]] Value with_absent_states(const Value& states, ModuleRef model, Group& group);

}  // namespace tessera::detail
