// Names that no other process picks.
#pragma once

#include <string>

namespace tessera {

// 12 lower-case hex digits: one attempt at writing something.
[[nodiscard]] std::string random_attempt();
// A version 4 UUID, as torch names a save.
[[nodiscard]] std::string random_uuid();

}  // namespace tessera
