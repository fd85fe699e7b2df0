// A checkpoint as one tree.
#pragma once

#include <optional>

#include "tessera/checkpoint.h"

namespace tessera {

// The file's own tree where it has one and `leaves` are still all of it, otherwise unflatten of
// `leaves`. Its nodes are the checkpoint's own: see Checkpoint::tree() for a copy.
[[nodiscard]] Value shared_tree(const Checkpoint& checkpoint);

// `leaf` as it is seen from `path`, below which it lies. None: it does not.
[[nodiscard]] std::optional<Leaf> part_below(const Leaf& leaf, const Path& path);

}  // namespace tessera
