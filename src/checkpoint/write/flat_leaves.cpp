#include "checkpoint/write/flat_leaves.h"

#include <unordered_set>

#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

using Names = std::unordered_set<std::string>;

// A tensor's attributes and whatever else is no tensor.
bool may_hold_tensors(const Value& value) {
  return !value.is(Value::Kind::tensor) || value.as_tensor().attributes;
}

// `base`, numbered where it is taken; from now on it is.
std::string take_name(std::string base, Names& names) {
  if (base.starts_with('.')) base.erase(0, 1);  // of a root that is no container
  std::string name = base;
  for (int n = 1; !names.insert(name).second; ++n) name = base + "~" + std::to_string(n);
  return name;
}

}  // namespace

void require_flat_names(const std::vector<Leaf>& leaves) {
  Names names;
  names.reserve(leaves.size());
  for (const Leaf& leaf : leaves) {
    std::string name = leaf.path.empty() ? leaf.name : dotted(leaf.path);
    if (names.insert(name).second) continue;
    throw Error(ErrorCode::conflict,
                "two leaves of the tree would have this name; torch files alone can hold both")
        .at_key(printable(name));
  }
}

void add_inner_tensors(std::vector<Leaf>& leaves) {
  std::unordered_set<const void*> known;  // tensors that have a name
  Names names;
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) known.insert(leaf.value.identity());
    names.insert(leaf.name);
  }
  const std::size_t count = leaves.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (!may_hold_tensors(leaves[i].value)) continue;
    for (const InnerTensor& inner : inner_tensors(leaves[i].value)) {
      if (!known.insert(inner.tensor->identity()).second) continue;
      std::string name = take_name(leaves[i].name + inner.path, names);
      Value found = *inner.tensor;
      leaves.push_back({std::move(name), {}, std::move(found)});
    }
  }
}

}  // namespace tessera
