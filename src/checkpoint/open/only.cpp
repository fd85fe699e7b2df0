// A part of a checkpoint's leaves, by names, beginnings of names and globs.
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/read/choice.h"
#include "tessera/checkpoint.h"

namespace tessera {

Checkpoint Checkpoint::only(const std::vector<std::string>& keys) const {
  Choice choice(leaves);
  for (const std::string& key : keys) {
    if (!choice.add(key)) refuse_key(key, leaves, path);
  }
  std::size_t at = 0;
  Checkpoint made = map([&](Leaf leaf) -> std::optional<Leaf> {
    return choice.has(at++) ? std::optional(std::move(leaf)) : std::nullopt;
  });
  if (!fill_holes(made.leaves).empty()) made.index_names();
  return made;
}

}  // namespace tessera
