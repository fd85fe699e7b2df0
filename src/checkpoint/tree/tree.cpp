#include "checkpoint/tree/tree.h"

#include <map>
#include <string_view>

#include "tessera/error.h"
#include "value/copy.h"

namespace tessera {
namespace {

// Whether nobody has taken away or replaced a leaf since the checkpoint was opened.
bool has_all_leaves(const Checkpoint& checkpoint) {
  std::map<std::string_view, const void*> nodes;
  for (const Leaf& leaf : checkpoint.leaves) nodes.emplace(leaf.name, leaf.value.identity());
  for (const Leaf& leaf : leaves_of(*checkpoint.root)) {
    const auto found = nodes.find(leaf.name);
    if (found == nodes.end() || found->second != leaf.value.identity()) return false;
  }
  return true;
}

}  // namespace

Value shared_tree(const Checkpoint& checkpoint) {
  if (checkpoint.root && has_all_leaves(checkpoint)) return *checkpoint.root;
  try {
    return unflatten(checkpoint.leaves);
  } catch (Error& error) {
    throw error.at_path(checkpoint.path);
  }
}

Value Checkpoint::tree() const {
  return copy_tree(shared_tree(*this));
}

}  // namespace tessera
