// The state of a checkpoint's optimizer as that of a live one: found by the names of parameters,
// whatever the order of groups, and whether it goes by names or by numbers (checkpoint-rows O-13,
// O-42).
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera::detail {

struct OptimMatch {
  // {"state", "param_groups"} with the names and groups of the live optimizer.
  Value stored;
  std::map<std::string, PathPart> keys;  // of the checkpoint's state, by the names in `stored`
  std::vector<std::size_t> groups;       // of the checkpoint, by group in `stored`
  std::vector<Value> orders;  // by group: the names in it, in the checkpoint's order; none if split
  bool is_split = false;      // its one group became two
};

// `stored` is a checkpoint's optimizer: tensors need no pieces. `live` is what OptimLeaves::tree()
// gives. Throws `mismatch` if a group would lose or gain a parameter, if numbers have no names, and
// if one group is to become two of which the second has weight decay; `not_found` without groups.
[[nodiscard]] OptimMatch match_optim(const Value& stored, const Value& live);

}  // namespace tessera::detail
