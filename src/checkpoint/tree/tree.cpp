#include "checkpoint/tree/tree.h"

#include <algorithm>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <variant>
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

// Whether `there` is the step `wanted`, or a name that it has.
bool is_text_of(const PathPart& wanted, const PathPart& there) {
  const auto* key = std::get_if<DictKey>(&wanted);
  const auto* name = std::get_if<std::string>(&there);
  return key != nullptr && name != nullptr ? key->text == *name : wanted == there;
}

template <typename IsStep>
std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path,
                                      IsStep is_step) {
  std::vector<std::size_t> found;
  for (std::size_t i = 0; i < checkpoint.leaves.size(); ++i) {
    const Path& way = checkpoint.leaves[i].path;
    if (way.size() > path.size() &&
        std::ranges::equal(path, std::span(way).first(path.size()), is_step))
      found.push_back(i);
  }
  return found;
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

std::vector<std::size_t> leaves_below(const Checkpoint& checkpoint, const Path& path) {
  const auto same = [](const PathPart& wanted, const PathPart& there) { return wanted == there; };
  auto found = leaves_below(checkpoint, path, same);
  return found.empty() ? leaves_below(checkpoint, path, is_text_of) : found;
}

Leaf part_of(const Leaf& leaf, std::size_t steps) {
  const auto count = static_cast<std::ptrdiff_t>(steps);
  Leaf part = leaf;
  part.path.erase(part.path.begin(), part.path.begin() + count);
  if (leaf.containers) {
    part.containers = std::make_shared<const Containers>(leaf.containers->begin() + count,
                                                         leaf.containers->end());
  }
  return part;
}

Value Checkpoint::tree() const {
  return copy_tree(shared_tree(*this));
}

}  // namespace tessera
