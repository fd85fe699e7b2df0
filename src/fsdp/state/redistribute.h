// Parts of tensors: what a rank holds of a unit's parameters, chunks of rows, and copies between
// arrays of them, as a plan of src/layout says.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "fsdp/unit/unit.h"
#include "tessera/layout.h"
#include "tessera/value.h"

namespace tessera::detail {

// Fills part `to` of the one-dimensional `to_array` from parts of `from_array`, of the same dtype.
// Throws `incomplete` where no part has an element.
void redistribute(const Shape& shape, const at::Tensor& from_array, std::span<const Part> from,
                  const at::Tensor& to_array, const Part& to);

// What `rank` holds of parameter `index` of a sharded unit, in its shard.
[[nodiscard]] inline const Part& part_of(const Unit& unit, std::size_t index, int rank) {
  return unit.layout().parts[rank][index];
}

// What torch.chunk gives `rank` of `world` of a tensor along dimension 0; sizes 0: nothing. Every
// rank gets all of one without dimensions.
[[nodiscard]] Box chunk_of(const Shape& shape, int world, int rank);
// `tensor` as the part `box` of a tensor of `shape` that is sharded; what holds nothing is no
// piece.
[[nodiscard]] Tensor chunk_leaf(const at::Tensor& tensor, const Shape& shape, const Box& box);
// The piece, a box in memory, as a tensor over that memory.
[[nodiscard]] at::Tensor tensor_of_piece(const Tensor& tensor, const Piece& piece);
// `piece`, but in the memory of `elements`.
[[nodiscard]] Piece piece_in(const Piece& piece, const at::Tensor& elements);

}  // namespace tessera::detail
