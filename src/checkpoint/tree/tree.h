// A checkpoint as one tree.
#pragma once

#include <cstddef>
#include <vector>

#include "tessera/checkpoint.h"

namespace tessera {

// The file's own tree where it has one and `leaves` are still all of it, otherwise unflatten of
// `leaves`. Its nodes are the checkpoint's own: see Checkpoint::tree() for a copy.
[[nodiscard]] Value shared_tree(const Checkpoint& checkpoint);

// The indices of the leaves below `path`. A file that has only names knows no keys but strings: a
// key of another type is found there by its text.
[[nodiscard]] std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path);
// `leaf` as it is seen from the place to which the first `steps` of its path lead.
[[nodiscard]] Leaf part_of(const Leaf& leaf, std::size_t steps);

}  // namespace tessera
