// Who writes which part of the tensors whose placement all ranks know.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/save/planned_leaf.h"
#include "tessera/checkpoint.h"

namespace tessera {

struct PlacedPart {
  std::vector<Box> boxes;
  int writer = 0;   // rank
  int holders = 1;  // ranks
};

using WriterFunction = decltype(SaveOptions::writer);

// Who writes what several ranks hold.
struct WriterRules {
  ReplicaWriter replicas = ReplicaWriter::fewest_bytes;
  WriterFunction function = {};  // decides instead, if there is one
};

// Goes through the leaves of a save in their order, on every rank with the same result: of the
// ranks that hold a part, the one writes it that has the fewest bytes so far, or the lowest, or
// that a function chooses. Throws `invalid_argument` if that does not hold the part.
class PlacedWalk {
 public:
  PlacedWalk(int ranks, WriterRules rules)
      : rules_(std::move(rules)), loads_(static_cast<std::size_t>(ranks), 0) {}

  using Visit = std::function<void(int part, const PlacedPart& made)>;
  // Visits the parts that have elements, and that of a tensor without any. `leaf` has a placement.
  void leaf(const PlannedLeaf& leaf, const Visit& visit);
  // Of an item that is written apart from the walk.
  void add_load(int rank, std::uint64_t bytes) { loads_[static_cast<std::size_t>(rank)] += bytes; }
  // The rank of `holders` (ascending, not empty) that writes a part of `key`, by the same rules.
  [[nodiscard]] int writer_of(const std::string& key, std::span<const int> holders) const;

 private:
  [[nodiscard]] int ranks() const { return static_cast<int>(loads_.size()); }
  [[nodiscard]] int writer_of_part(const PlannedLeaf& leaf, int part) const;
  [[nodiscard]] int chosen(const std::string& key, std::span<const int> holders) const;

  WriterRules rules_;
  std::vector<std::uint64_t> loads_;  // bytes that each rank writes, so far
};

}  // namespace tessera
