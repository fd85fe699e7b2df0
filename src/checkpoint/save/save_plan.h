// Who writes what: the pure part of a save. No I/O, no ranks, no tensors' bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "format/dcp/dcp.h"
#include "tessera/comm.h"
#include "tessera/value.h"

namespace tessera {

// One thing that a rank could write: a chunk of a tensor, or a value.
struct WriteItem {
  std::string name;
  Path path;
  bool is_tensor = false;
  DType dtype = DType::float32;  // tensors
  Shape shape;
  Box box;  // the chunk
  bool requires_grad = false;
  bool held = true;       // false: a tensor of which the proposer holds nothing, others have to
  std::size_t leaf = 0;   // index of the leaf in the proposer's flattened tree
  std::size_t piece = 0;  // index of the leaf's piece
};

// Leaf number `index` as an item, without its box and piece.
[[nodiscard]] WriteItem item_of(const Leaf& leaf, std::size_t index);

// What one rank proposes to write, in the order of its tree (P-12): of a tensor
// of which others hold all pieces it says so, in an item that is never assigned.
[[nodiscard]] std::vector<WriteItem> propose(const std::vector<Leaf>& leaves);

// Where a written item ended up.
struct WrittenItem {
  std::size_t item = 0;  // index into the rank's proposal
  dcp::Item where;
};

// assignment[r]: indices into proposals[r] that rank r writes, ascending.
struct SavePlan {
  std::vector<std::vector<std::size_t>> assignment;
};

// Chooses one writer for every replica (P-13): the rank with the fewest bytes so far, ties to the
// lowest; values always from the lowest rank, so that a rank-dependent value is a stated one
// . Proves that ranks agree on shapes and dtypes (`mismatch`) and that chunks cover every
// tensor once (P-14).
[[nodiscard]] SavePlan plan_save(const std::vector<std::vector<WriteItem>>& proposals);

// The `.metadata` of a save: entries in order of first appearance, chunks in rank order.
[[nodiscard]] dcp::Metadata metadata_of(const std::vector<std::vector<WriteItem>>& proposals,
                                        const std::vector<std::vector<WrittenItem>>& written);

// Messages between ranks.
[[nodiscard]] Bytes encode_proposal(const std::vector<WriteItem>& items);
[[nodiscard]] std::vector<WriteItem> decode_proposal(const Bytes& message);
[[nodiscard]] Bytes encode_indices(const std::vector<std::size_t>& indices);
[[nodiscard]] std::vector<std::size_t> decode_indices(const Bytes& message);
[[nodiscard]] Bytes encode_written(const std::vector<WrittenItem>& items);
[[nodiscard]] std::vector<WrittenItem> decode_written(const Bytes& message);

}  // namespace tessera
