// Trees on their way into files of names.
#pragma once

#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// Throws `conflict` when the dotted paths of two leaves are one name: a flat file has one tensor of
// a name.
void require_flat_names(const std::vector<Leaf>& leaves);

// Appends the tensors inside of leaves that are tuples, objects and the like, as leaves without a
// path: "LEAF.1", "LEAF.state.weight". Where such a name is taken, "~1" and so on is added.
void add_inner_tensors(std::vector<Leaf>& leaves);

}  // namespace tessera
