#include "comm/tree.h"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace tessera {
namespace {

// The ranks of a subtree: `root` and those behind it.
struct Subtree {
  int root = 0;
  int end = 0;
};

std::vector<Subtree> subtrees_of(const Subtree& tree) {
  const std::int64_t below = tree.end - tree.root - 1;
  const std::int64_t parts = std::min<std::int64_t>(kFanOut, below);
  const auto begin_of = [&](std::int64_t part) {
    return static_cast<int>(tree.root + 1 + below * part / parts);
  };
  std::vector<Subtree> subtrees;
  for (std::int64_t part = 0; part < parts; ++part)
    subtrees.push_back({begin_of(part), begin_of(part + 1)});
  return subtrees;
}

Bytes fold_subtree(const Subtree& tree, std::vector<Bytes>& messages, const Combine& combine) {
  Bytes all = std::move(messages[static_cast<std::size_t>(tree.root)]);
  for (const Subtree& below : subtrees_of(tree))
    all = combine(std::move(all), fold_subtree(below, messages, combine));
  return all;
}

}  // namespace

TreePlace place_in_tree(int rank, int size) {
  TreePlace place;
  Subtree tree{0, size};
  while (tree.root != rank) {
    place.parent = tree.root;
    const std::vector<Subtree> below = subtrees_of(tree);
    tree = *std::ranges::find_if(below, [rank](const Subtree& part) { return rank < part.end; });
  }
  for (const Subtree& below : subtrees_of(tree)) place.children.push_back(below.root);
  return place;
}

Bytes fold_along_tree(std::vector<Bytes> messages, const Combine& combine) {
  return fold_subtree({0, static_cast<int>(messages.size())}, messages, combine);
}

}  // namespace tessera
