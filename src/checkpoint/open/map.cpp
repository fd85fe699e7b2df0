#include <utility>

#include "checkpoint/read/select.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {

Checkpoint Checkpoint::map(const LeafFunction& fn) const {
  Checkpoint made = *this;
  made.mapped = true;
  made.root.reset();
  made.files.clear();  // those that tensors lie in are known by their pieces
  made.leaves.clear();
  for (const Leaf& leaf : leaves) {
    std::optional<Leaf> given = fn(leaf);
    if (!given) continue;
    Leaf kept = std::move(*given);
    std::string name = std::exchange(kept.name, leaf.name);
    if (name.empty()) throw Error(ErrorCode::conflict, "a leaf lost its name").at_key(leaf.name);
    if (name != leaf.name) rename(kept, std::move(name));
    made.leaves.push_back(std::move(kept));
  }
  made.index_names();
  for (std::size_t i = 1; i < made.by_name_.size(); ++i) {
    const std::string& name = made.leaves[made.by_name_[i]].name;
    if (made.leaves[made.by_name_[i - 1]].name == name)
      throw Error(ErrorCode::conflict, "two leaves get one name").at_key(printable(name));
  }
  return made;
}

}  // namespace tessera
