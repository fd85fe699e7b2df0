// Trees of their own.
#pragma once

#include <functional>
#include <optional>

#include "tessera/value.h"

namespace tessera {

// Gives what stands for a node in a copy; none: the node's own copy.
using Replacement = std::function<std::optional<Value>(const Value& node)>;

// A copy of a walkable tree (depth.h) whose containers, objects, tensors and descriptions of
// storages are its own, so that changing one tree leaves the other as it is; the bytes of storages
// are shared. What one tree shares between places its copy shares, too. `replacement`, if there is
// one, is asked once for each node that is not a number, a string or the like.
[[nodiscard]] Value copy_tree(const Value& tree, const Replacement& replacement = {});

}  // namespace tessera
