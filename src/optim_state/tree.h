// Trees of state: copies, and the order of entries.
#pragma once

#include <torch/types.h>

#include <string>
#include <vector>

#include "tessera/value.h"

namespace tessera::detail {

// A tree that shares nothing with this one: containers are new, tensors have memory of their own
// (spec ).
[[nodiscard]] Value deep_copy(const Value& tree);

// The piece, a box in memory, as a tensor over that memory.
[[nodiscard]] at::Tensor tensor_of_piece(const Tensor& tensor, const Piece& piece);

// `tensor` as a leaf of a tensor of `shape`, of which it is `box`, with sharded tensors' rule: what
// holds nothing is no piece.
[[nodiscard]] Value chunk_leaf(const at::Tensor& tensor, const Shape& shape, const Box& box);

[[nodiscard]] inline bool is_shaped(const Value& value) {
  return value.is(Value::Kind::tensor) && !value.as_tensor().shape.empty();
}

}  // namespace tessera::detail
