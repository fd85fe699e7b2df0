// N ranks' trees of one state become one tree: pieces of sharded tensors are put together, other
// values must agree.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"

namespace tessera {

// Values below this name are each rank's own (its random numbers, its place in the data): rank 0's
// are kept (checkpoint-rows O-62).
inline constexpr std::string_view kTrainState = "train";

// What N ranks' trees are together.
struct Merged {
  // The structure of rank 0's and what only other ranks have. Pieces are in the order of ranks; of
  // replicas the lowest rank's stays.
  Value tree;
  std::vector<Leaf> replicas;         // tensors with the pieces that did not stay
  std::vector<std::string> warnings;  // which of the train state's values differ
};

class RankMerge {
 public:
  // Adds a rank's tree, whose sharded tensors carry that rank's pieces. Rank 0 comes first; the
  // others may come in any order and from several threads. Throws, naming both ranks and the leaf,
  // `corrupt` when shape, dtype or kind of a sharded tensor differ, and `mismatch` when another
  // value does.
  void add(int rank, Value tree);

  [[nodiscard]] Merged finish();  // once

 private:
  void begin(Value tree, std::vector<Leaf> leaves);  // with rank 0's
  void merge(int rank, const Leaf& leaf, const Leaf& known);
  void add_pieces(int rank, const Leaf& leaf, const Leaf& known);
  void insert(int rank, const Leaf& leaf);
  // The dict that holds what this path leads to; dicts that are missing on the way are made. None:
  // something else is on the way.
  [[nodiscard]] std::optional<Value> place_of(const Path& path);
  void add_late();

  std::mutex mutex_;
  Value tree_;
  std::map<std::string, Leaf, std::less<>> leaves_;  // of tree_; guarded by mutex_
  struct Late {
    int rank = 0;
    Leaf leaf;
  };
  std::vector<Late> late_;           // what rank 0 lacks; guarded by mutex_
  std::vector<std::string> differ_;  // of the train state; guarded by mutex_
};

}  // namespace tessera
