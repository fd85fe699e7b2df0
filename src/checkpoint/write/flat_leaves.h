// Trees on their way into files of names.
#pragma once

#include <string>
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

// Optimizer state by number, as optimizer.state_dict() has it, that came through a file of names.

// What PyTorch writes as DCP has no keys but strings, and Optimizer.load_state_dict passes over
// state under "0" without a word. Where a dict has `param_groups` whose `params` are numbers, and
// every key of its `state` is one of them, written out, the keys become numbers. Returns the names
// of these dicts of state; the leaves' own names stay.
std::vector<std::string> number_state(std::vector<Leaf>& leaves);
// Whether number_state would change any: there may be a million leaves, and it needs a copy.
[[nodiscard]] bool has_numbered_state(const std::vector<Leaf>& leaves);

}  // namespace tessera
