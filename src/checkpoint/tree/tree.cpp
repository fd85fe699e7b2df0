#include "checkpoint/tree/tree.h"

#include <algorithm>
#include <map>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/error.h"
#include "value/copy.h"

namespace tessera {
namespace {

std::map<std::string_view, const void*> nodes_by_name(const std::vector<Leaf>& leaves) {
  std::map<std::string_view, const void*> nodes;
  for (const Leaf& leaf : leaves) nodes.emplace(leaf.name, leaf.value.identity());
  return nodes;
}

// Whether nobody has taken away or replaced a leaf since the checkpoint was opened.
bool has_all_leaves(const Checkpoint& checkpoint) {
  const auto nodes = nodes_by_name(checkpoint.leaves);
  return std::ranges::all_of(leaves_of(*checkpoint.root), [&nodes](const Leaf& leaf) {
    const auto found = nodes.find(leaf.name);
    return found != nodes.end() && found->second == leaf.value.identity();
  });
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

std::optional<Leaf> part_below(const Leaf& leaf, const Path& path) {
  if (leaf.path.size() <= path.size() ||
      !std::ranges::equal(path, std::span(leaf.path).first(path.size())))
    return std::nullopt;
  const auto steps = static_cast<std::ptrdiff_t>(path.size());
  Leaf part = leaf;
  part.path.erase(part.path.begin(), part.path.begin() + steps);
  if (leaf.containers) {
    part.containers = std::make_shared<const Containers>(leaf.containers->begin() + steps,
                                                         leaf.containers->end());
  }
  return part;
}

Value Checkpoint::tree() const {
  return copy_tree(shared_tree(*this));
}

}  // namespace tessera
