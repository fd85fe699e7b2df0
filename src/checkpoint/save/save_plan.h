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

// What one rank proposes to write, in the order of its tree (checkpoint-rows P-12): of a tensor
// of which others hold all pieces it says so, in an item that is never assigned.
[[nodiscard]] std::vector<WriteItem> propose(const std::vector<Leaf>& leaves);

// Where a written item ended up.
struct WrittenItem {
  std::size_t item = 0;  // index into the rank's proposal
  dcp::Item where;
};

// Indices into proposals[r], ascending: assignment[r] of what rank r writes, copied[r] of the
// chunks of it that other ranks hold too.
struct SavePlan {
  std::vector<std::vector<std::size_t>> assignment;
  std::vector<std::vector<std::size_t>> copied;
};

// Chooses one writer for every replica (checkpoint-rows P-13): the rank with the fewest bytes so
// far, ties to the lowest; values always from the lowest rank, so that a rank-dependent value is a
// stated one (checkpoint-rows Q-09). Proves that ranks agree on shapes and dtypes (`mismatch`) and
// that chunks cover every tensor once (checkpoint-rows P-14).
[[nodiscard]] SavePlan plan_save(const std::vector<std::vector<WriteItem>>& proposals);

// The `.metadata` of a save: entries in order of first appearance, chunks in rank order.
[[nodiscard]] dcp::Metadata metadata_of(const std::vector<std::vector<WriteItem>>& proposals,
                                        const std::vector<std::vector<WrittenItem>>& written);

// Messages between ranks.
[[nodiscard]] Bytes encode_proposal(const std::vector<WriteItem>& items);
[[nodiscard]] std::vector<WriteItem> decode_proposal(const Bytes& message);
// What rank 0 tells one rank: its part of the plan, and whether copies have to be equal.
struct Orders {
  std::vector<std::size_t> assigned;
  std::vector<std::size_t> copied;
  bool equal_copies = false;
};
[[nodiscard]] Bytes encode_orders(const Orders& orders);
[[nodiscard]] Orders decode_orders(const Bytes& message);
// What one rank tells rank 0: where its items are, and samples of what it holds as others do
// (copies.h).
struct Written {
  std::vector<WrittenItem> items;
  std::vector<std::uint64_t> samples;
};
[[nodiscard]] Bytes encode_written(const Written& written);
[[nodiscard]] Written decode_written(const Bytes& message);

}  // namespace tessera
