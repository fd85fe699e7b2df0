// What is wrong with several keys, as one error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "checkpoint/dcp/catalog.h"
#include "comm/message.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera {

class KeyErrors {
 public:
  // `error` is about its key.
  void add(const Error& error);
  // One alone is thrown as it is. Of several the first 100 are told and all are counted; the code
  // is the one that they share, else `mismatch`.
  void require_none() const;

 private:
  std::vector<Error> told_;
  std::size_t count_ = 0;
  bool one_code_ = true;
};

// A leaf of a save as all ranks know it, and what of it a rank holds.

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
// But for the path.
auto fields(FieldsOf<PlannedLeaf> auto& leaf) {
  return std::tie(leaf.name, leaf.is_tensor, leaf.is_kept, leaf.dtype, leaf.shape,
                  leaf.requires_grad, leaf.placement);
}

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

// Whether `a` comes before `b` in the order of a tensor's chunks: row-major, by where they begin.
[[nodiscard]] bool begins_before(const Box& a, const Box& b);

void write_leaf(MessageWriter& message, const PlannedLeaf& leaf);
[[nodiscard]] PlannedLeaf read_leaf(MessageReader& message);

// Who writes which part of the tensors whose placement all ranks know.

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
  PlacedWalk(int ranks, WriterRules rules) : ranks_(ranks), rules_(std::move(rules)) {}

  using Visit = std::function<void(int part, const PlacedPart& made)>;
  // Visits the parts that have elements, and that of a tensor without any. `leaf` has a placement.
  void leaf(const PlannedLeaf& leaf, const Visit& visit);
  // The same for who needs one part alone; none if that would not be visited. What the others add
  // to their writers' bytes is counted when somebody's choice depends on it: `leaf` outlives this.
  [[nodiscard]] std::optional<PlacedPart> part_of(const PlannedLeaf& leaf, int part);
  // The bytes of an item that is written apart from the walk.
  void add_load(int rank, std::uint64_t bytes);
  // The rank of `holders` (ascending, not empty) that writes a part of `key`, by the same rules.
  [[nodiscard]] int writer_of(const std::string& key, std::span<const int> holders);

 private:
  // Whether bytes decide who writes.
  [[nodiscard]] bool weighs() const {
    return !rules_.function && rules_.replicas == ReplicaWriter::fewest_bytes;
  }
  [[nodiscard]] int writer_of_part(const PlannedLeaf& leaf, int part, int holders);
  [[nodiscard]] int chosen(const std::string& key, std::span<const int> holders) const;
  void settle();
  [[nodiscard]] std::uint64_t load_of(int rank) const {
    return loads_[static_cast<std::size_t>(rank)];
  }

  int ranks_;
  WriterRules rules_;
  // Bytes that each rank writes, so far; by rank, empty before the first choice depends on them.
  std::vector<std::uint64_t> loads_;
  std::vector<const PlannedLeaf*> uncounted_;  // whose bytes are not in `loads_` yet
};

}  // namespace tessera
