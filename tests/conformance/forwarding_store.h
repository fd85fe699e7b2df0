// For tests whose store is different in what they say.
#pragma once

#include "storage/forwarding_store.h"

namespace tessera::testing {

using tessera::ForwardingStore;

}  // namespace tessera::testing
