// A leaf of a save as all ranks know it, and what of it a rank holds.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "comm/message.h"
#include "tessera/leaf.h"

namespace tessera {

struct PlannedLeaf {
  std::string name;
  Path path;
  bool is_tensor = false;
  bool is_kept = false;          // under a name of this rank's own, because it differs
  DType dtype = DType::float32;  // this and the rest: of tensors
  Shape shape;
  bool requires_grad = false;
  // What each rank holds, if all ranks can compute it. None: they have to tell.
  std::optional<Placement> placement;
};

// A chunk that this rank holds.
struct HeldChunk {
  Box box;
  std::size_t piece = 0;  // index of the tensor's piece
};
// In row-major order of where they begin, each once, without empty ones. A tensor without elements
// is held whole by whoever has the leaf; there is no piece to be read. Throws `unsupported` for
// flat ranges, `corrupt` for a piece that reaches outside of its tensor and `conflict` where two
// overlap: for every way to save.
[[nodiscard]] std::vector<HeldChunk> held_chunks(const Tensor& tensor);

// The leaf as rank `rank` of `ranks` sees it. A tensor has a placement if its own, or that of a
// tensor which every rank holds whole, says what this rank's pieces are.
[[nodiscard]] PlannedLeaf planned(const Leaf& leaf, int rank, int ranks);

// "NAME.rank3", under which rank 3 keeps a value or tensor that differs from that of NAME.
[[nodiscard]] std::string kept_name(const std::string& name, int rank);

// Where a box is in the order of a tensor's chunks: row-major, by where they begin.
[[nodiscard]] bool begins_before(const Box& a, const Box& b);

void write_leaf(MessageWriter& message, const PlannedLeaf& leaf);
[[nodiscard]] PlannedLeaf read_leaf(MessageReader& message);

}  // namespace tessera
