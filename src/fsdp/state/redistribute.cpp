#include "fsdp/state/redistribute.h"

#include <utility>

#include "fsdp/unit/quiet_copy.h"
#include "layout/boxes.h"
#include "layout/plan.h"
#include "torch/tensor.h"

namespace tessera::detail {

void redistribute(const Shape& shape, const at::Tensor& from_array, std::span<const Part> from,
                  const at::Tensor& to_array, const Part& to) {
  if (numel(to.slice) == 0) return;
  std::vector<Slice> slices;
  slices.reserve(from.size());
  for (const auto& part : from) slices.push_back(part.slice);
  const std::span<const Slice> wanted(&to.slice, 1);
  const auto plan = plan_copies(shape, slices, wanted);
  require_filled(shape, wanted, plan);
  for (const auto& copy : plan) {
    copy_quietly(to_array, to.base + copy.to_local, from_array,
                 from[copy.from].base + copy.from_local, copy.count);
  }
}

Box chunk_of(const Shape& shape, int world, int rank) {
  return shape.empty() ? whole(shape) : tessera::chunk_of(whole(shape), 0, world, rank);
}

Tensor chunk_leaf(const at::Tensor& tensor, const Shape& shape, const Box& box) {
  auto leaf = leaf_of(tensor);
  leaf.shape = shape;
  leaf.sharded = true;
  leaf.pieces.front().slice = box;
  if (numel(box) == 0) leaf.pieces.clear();
  return leaf;
}

Piece piece_in(const Piece& piece, const at::Tensor& elements) {
  auto here = std::move(leaf_of(elements).pieces.front());
  here.slice = piece.slice;
  here.rank = piece.rank;
  return here;
}

at::Tensor tensor_of_piece(const Tensor& tensor, const Piece& piece) {
  Tensor part;
  part.dtype = tensor.dtype;
  part.shape = std::get<Box>(piece.slice).sizes;
  part.pieces = {{.slice = whole(part.shape),
                  .storage = piece.storage,
                  .storage_offset = piece.storage_offset,
                  .strides = piece.strides,
                  .conj = piece.conj,
                  .neg = piece.neg}};
  return tensor_of(part);
}

}  // namespace tessera::detail
