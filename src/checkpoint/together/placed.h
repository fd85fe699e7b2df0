// The tensors of a state that N ranks save, and what each rank holds of them.
#pragma once

#include <unordered_map>
#include <vector>

#include "checkpoint/save/planned_leaf.h"

namespace tessera {

// One of them, as this rank has it.
struct PlacedTensor {
  const Leaf* leaf = nullptr;
  Placement placement;
};

class PlacedTensors {
 public:
  // `leaves` are tensors and outlive this. Throws `unsupported` for one of which ranks cannot
  // compute what the others hold, `invalid_argument` for a piece outside of its storage.
  PlacedTensors(const std::vector<const Leaf*>& leaves, int rank, int ranks);

  [[nodiscard]] const std::vector<PlacedTensor>& all() const { return all_; }
  [[nodiscard]] const Placement& of(const Leaf& leaf) const {
    return all_[by_leaf_.at(&leaf)].placement;
  }
  // A digest of names, types, shapes and placements.
  [[nodiscard]] std::uint64_t digest() const { return digest_; }

 private:
  std::vector<PlacedTensor> all_;
  std::unordered_map<const Leaf*, std::size_t> by_leaf_;
  std::uint64_t digest_ = 0;
};

}  // namespace tessera
