// at::Tensor and the tensor leaves of value trees: the same memory under both names.
#pragma once

#include <torch/types.h>

#include "tessera/value.h"

namespace tessera {

// Each throws `unsupported` for a type that the other side lacks.
[[nodiscard]] DType dtype_of(at::ScalarType type);
[[nodiscard]] at::ScalarType scalar_type_of(DType dtype);

// A leaf whose one piece is all of `tensor`, which must be strided and on the CPU or a CUDA device:
// else `unsupported`. torch.save files say "cpu" for it in any case, so that every machine can load
// them. What is copied from a device is as device_memory_of says.
[[nodiscard]] Tensor leaf_of(const at::Tensor& tensor);
// A leaf of a tensor of `shape` whose slices of dimension `dim` from `offset` on are `rows`,
// contiguous: a chunk of a DTensor.
[[nodiscard]] Tensor sharded_leaf_of(const at::Tensor& rows, const Shape& shape,
                                     std::int64_t offset, int dim = 0);

// The same of a tensor whose elements from `begin` on, in row-major order, are `elements`,
// contiguous: part of an FSDP1 shard. Its pieces are boxes, as DCP has them.
[[nodiscard]] Tensor flat_leaf_of(const at::Tensor& elements, const Shape& shape,
                                  std::int64_t begin);

// That a tensor is the conjugate or the negative of what its memory holds is a bit beside it.
[[nodiscard]] bool is_plain(const at::Tensor& tensor);  // without such a bit
// `tensor`, or where it has such a bit a copy without. Bytes of a tensor that a user or autograd
// made are handed on from here alone.
[[nodiscard]] at::Tensor plain(const at::Tensor& tensor);
// Gives `tensor` memory that holds what it is: kernels for lists change no others in place.
void make_plain(const at::Tensor& tensor);

// One piece in memory covers the leaf.
[[nodiscard]] bool is_whole_in_memory(const Tensor& leaf);
// A tensor over the memory of such a leaf; it keeps the memory alive. Throws `unsupported` for
// leaves that are elsewhere or in parts.
[[nodiscard]] at::Tensor tensor_of(const Tensor& leaf);

}  // namespace tessera
