// What every function that takes a caller's tensor asks first: libtorch's own words for an
// undefined one say neither what is wrong nor whose mistake it is.
#pragma once

#include <cstddef>
#include <span>

#include <ATen/core/Tensor.h>
#include <torch/types.h>

#include "tessera/error.h"
#include "tessera/value.h"

namespace tessera {

inline void require_defined(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined())
    throw Error(ErrorCode::invalid_argument, "an undefined tensor").while_doing(operation);
}

// at::Tensor and the tensor leaves of value trees: the same memory under both names.

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

// A tensor's elements as bytes in the host's memory.

// The tensor contiguous on the host; the tensor itself where it is that already.
[[nodiscard]] inline at::Tensor to_host(const at::Tensor& tensor) {
  return plain(tensor.detach()).cpu().contiguous();
}

// The bytes of what to_host gave, which has to live as long.
[[nodiscard]] inline std::span<const std::byte> host_bytes(const at::Tensor& host) {
  return {static_cast<const std::byte*>(host.const_data_ptr()), host.nbytes()};
}

}  // namespace tessera
