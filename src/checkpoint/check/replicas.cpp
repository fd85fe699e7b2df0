#include "checkpoint/check/replicas.h"

#include <algorithm>

#include "checkpoint/read/same_elements.h"
#include "tessera/error.h"

namespace tessera {
namespace {

Shape shape_of(const Slice& slice) {
  if (const auto* box = std::get_if<Box>(&slice)) return box->sizes;
  return {numel(slice)};
}

// What a piece holds, as a tensor of its own.
Tensor part_of(const Tensor& tensor, const Piece& piece) {
  Tensor part;
  part.dtype = tensor.dtype;
  part.shape = shape_of(piece.slice);
  part.pieces.push_back(piece);
  part.pieces[0].slice = whole(part.shape);
  return part;
}

[[noreturn]] void refuse(const Piece& kept, const Piece& other, const std::string& name) {
  throw Error(ErrorCode::mismatch, "ranks " + std::to_string(kept.rank) + " and " +
                                       std::to_string(other.rank) + " hold copies of " +
                                       to_string(kept.slice) + " that differ")
      .at_key(name);
}

}  // namespace

void require_same_copies(const Checkpoint& checkpoint, const Leaf& replica) {
  const Leaf* leaf = checkpoint.find(replica.name);
  if (leaf == nullptr) return;  // left out of this checkpoint
  const Tensor& tensor = leaf->value.as_tensor();
  for (const Piece& other : replica.value.as_tensor().pieces) {
    const auto kept = std::ranges::find(tensor.pieces, other.slice, &Piece::slice);
    if (kept == tensor.pieces.end()) continue;
    if (!same_elements(part_of(tensor, *kept), part_of(tensor, other), replica.name))
      refuse(*kept, other, replica.name);
  }
}

std::uint64_t bytes_of(const std::vector<Leaf>& replicas) {
  std::uint64_t bytes = 0;
  for (const Leaf& leaf : replicas) {
    const Tensor& tensor = leaf.value.as_tensor();
    for (const Piece& piece : tensor.pieces) bytes += byte_size(tensor.dtype, {numel(piece.slice)});
  }
  return bytes;
}

}  // namespace tessera
