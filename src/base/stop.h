// Work that its caller may end early.
#pragma once

#include <stop_token>

#include "tessera/error.h"

namespace tessera {

// Throws `cancelled` once the caller has asked for an end.
inline void require_going_on(const std::stop_token& stop) {
  if (stop.stop_requested())
    throw Error(ErrorCode::cancelled, "the caller asked for the work to end");
}

}  // namespace tessera
