#include <algorithm>
#include <utility>

#include "checkpoint/read/select.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

// What a function has made of a leaf; its own name is kept in step with what it holds.
Leaf kept_leaf(const Leaf& leaf, Leaf given) {
  std::string name = std::exchange(given.name, leaf.name);
  if (name.empty()) throw Error(ErrorCode::conflict, "a leaf lost its name").at_key(leaf.name);
  if (name != leaf.name) rename(given, std::move(name));
  return given;
}

// `by_name`: the indices of the leaves, sorted by their names.
void require_own_names(const std::vector<Leaf>& leaves, const std::vector<std::uint32_t>& by_name) {
  const auto name_at = [&leaves](std::uint32_t at) -> const std::string& {
    return leaves[at].name;
  };
  const auto same = std::ranges::adjacent_find(by_name, {}, name_at);
  if (same != by_name.end())
    throw Error(ErrorCode::conflict, "two leaves get one name").at_key(printable(name_at(*same)));
}

}  // namespace

Checkpoint Checkpoint::map(const LeafFunction& fn) const {
  Checkpoint made = *this;
  made.mapped = true;
  made.root.reset();
  made.files.clear();  // those that tensors lie in are known by their pieces
  made.leaves.clear();
  for (const Leaf& leaf : leaves) {
    std::optional<Leaf> given = fn(leaf);
    if (!given) continue;
    made.leaves.push_back(kept_leaf(leaf, std::move(*given)));
  }
  made.index_names();
  require_own_names(made.leaves, made.by_name_);
  return made;
}

}  // namespace tessera
