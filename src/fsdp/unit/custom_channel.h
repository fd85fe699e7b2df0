// Channels whose collectives are the user's (fsdp-rows F29).
#pragma once

#include "fsdp/unit/param_store.h"
#include "tessera/unit_controls.h"

namespace tessera::detail {

// What is null stays the channel's own.
[[nodiscard]] ChannelWrapper custom_channels(Collective all_gather, Collective reduce_scatter);

}  // namespace tessera::detail
