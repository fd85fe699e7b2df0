// An optimizer's own form of state, before it is loaded.
#pragma once

#include "tessera/optimizer_ref.h"

namespace tessera::detail {

// Throws what load_optimizer_state_dict would throw.
void check_optimizer_state_dict(const OptimizerRef& optimizer, const Value& state_dict);

}  // namespace tessera::detail
