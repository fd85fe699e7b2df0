// Proof that a value can be walked: a caller may have built anything.
#pragma once

#include <cstddef>

#include "tessera/value.h"

namespace tessera {

// Containers and objects inside one another. Readers take 1000; a walk that calls itself for each
// level stays within a thread's stack.
inline constexpr std::size_t kMaxLevels = 2000;

// Throws `invalid_argument` for a value that contains itself and `limit` for one of more than
// kMaxLevels levels, naming a place. The work is bounded by the nodes, not by the paths to them.
void require_walkable(const Value& value);

}  // namespace tessera
