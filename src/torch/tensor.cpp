#include "torch/tensor.h"

#include <array>
#include <utility>

#include <torch/torch.h>

#include "layout/boxes.h"
#include "tessera/error.h"
#include "tessera/parameter.h"
#include "tessera/tensor_value.h"
#include "torch/device_memory.h"
#include "value/storage_reader.h"

namespace tessera {
namespace {

constexpr std::array kTypes{
    std::pair{DType::float32, at::kFloat},
    std::pair{DType::float64, at::kDouble},
    std::pair{DType::float16, at::kHalf},
    std::pair{DType::bfloat16, at::kBFloat16},
    std::pair{DType::int64, at::kLong},
    std::pair{DType::int32, at::kInt},
    std::pair{DType::int16, at::kShort},
    std::pair{DType::int8, at::kChar},
    std::pair{DType::uint8, at::kByte},
    std::pair{DType::bool8, at::kBool},
    std::pair{DType::uint16, at::kUInt16},
    std::pair{DType::uint32, at::kUInt32},
    std::pair{DType::uint64, at::kUInt64},
    std::pair{DType::complex32, at::kComplexHalf},
    std::pair{DType::complex64, at::kComplexFloat},
    std::pair{DType::complex128, at::kComplexDouble},
    std::pair{DType::float8_e4m3fn, at::kFloat8_e4m3fn},
    std::pair{DType::float8_e5m2, at::kFloat8_e5m2},
    std::pair{DType::float8_e4m3fnuz, at::kFloat8_e4m3fnuz},
    std::pair{DType::float8_e5m2fnuz, at::kFloat8_e5m2fnuz},
    std::pair{DType::float8_e8m0fnu, at::kFloat8_e8m0fnu},
    std::pair{DType::float4_e2m1fn_x2, at::kFloat4_e2m1fn_x2},
};

// c10 has what copies and streams need of a backend outside of libtorch.
bool has_device_memory(const at::Tensor& tensor) {
  return tensor.is_cuda() || tensor.is_privateuseone();
}

// The same memory, read as the piece's bits say.
at::Tensor with_bits_of(const Piece& piece, at::Tensor tensor) {
  if (piece.conj && tensor.is_complex()) tensor = at::_conj(tensor);
  return piece.neg ? at::_neg_view(tensor) : tensor;
}

Piece piece_of(const at::Tensor& tensor, Box box) {
  const bool on_device = has_device_memory(tensor);
  if ((!tensor.is_cpu() && !on_device) || tensor.layout() != at::kStrided) {
    throw Error(ErrorCode::unsupported, "a tensor on " + tensor.device().str() +
                                            ", expected a dense one on the CPU or a CUDA device");
  }
  const auto bytes = tensor.storage();
  auto storage = std::make_shared<Storage>();
  if (on_device) {
    storage->device = device_memory_of(tensor);
  } else {
    storage->data = static_cast<std::byte*>(bytes.mutable_data());
    storage->owner = std::make_shared<at::Tensor>(tensor);
  }
  storage->size = bytes.nbytes();
  storage->dtype = dtype_of(tensor.scalar_type());
  Piece piece{std::move(box), std::move(storage), tensor.storage_offset(), {}, -1};
  if (!tensor.is_contiguous()) piece.strides = tensor.strides().vec();
  piece.conj = tensor.is_conj();
  piece.neg = tensor.is_neg();
  return piece;
}

}  // namespace

DType dtype_of(at::ScalarType type) {
  for (const auto& [dtype, scalar] : kTypes) {
    if (scalar == type) return dtype;
  }
  throw Error(ErrorCode::unsupported, std::string("no dtype for torch's ") + c10::toString(type));
}

at::ScalarType scalar_type_of(DType dtype) {
  for (const auto& [known, scalar] : kTypes) {
    if (known == dtype) return scalar;
  }
  throw Error(ErrorCode::unsupported, "libtorch has no type for " + std::string(to_string(dtype)));
}

Tensor leaf_of(const at::Tensor& tensor) {
  Tensor leaf;
  leaf.dtype = dtype_of(tensor.scalar_type());
  leaf.shape = tensor.sizes().vec();
  leaf.pieces.push_back(piece_of(tensor.detach(), whole(leaf.shape)));
  return leaf;
}

Tensor sharded_leaf_of(const at::Tensor& rows, const Shape& shape, std::int64_t offset, int dim) {
  Tensor leaf;
  leaf.dtype = dtype_of(rows.scalar_type());
  leaf.shape = shape;
  leaf.sharded = true;
  Box box{Shape(shape.size(), 0), rows.sizes().vec()};
  box.offsets[dim] = offset;
  leaf.pieces.push_back(piece_of(rows.detach(), std::move(box)));
  return leaf;
}

Tensor flat_leaf_of(const at::Tensor& elements, const Shape& shape, std::int64_t begin) {
  Tensor leaf;
  leaf.dtype = dtype_of(elements.scalar_type());
  leaf.shape = shape;
  leaf.sharded = true;
  const auto flat = elements.detach().view({-1});
  std::int64_t at = 0;
  for (auto& box : boxes_of({begin, begin + flat.numel()}, shape)) {
    const auto count = numel(box);
    leaf.pieces.push_back(piece_of(flat.narrow(0, at, count), std::move(box)));
    at += count;
  }
  return leaf;
}

bool is_whole_in_memory(const Tensor& leaf) {
  if (leaf.pieces.size() != 1) return false;
  const auto& piece = leaf.pieces.front();
  return piece.storage && is_in_memory(*piece.storage) && numel(piece.slice) == numel(leaf.shape);
}

bool is_plain(const at::Tensor& tensor) {
  return !tensor.is_conj() && !tensor.is_neg();
}

void make_plain(const at::Tensor& tensor) {
  if (!is_plain(tensor)) tensor.set_data(plain(tensor));
}

at::Tensor plain(const at::Tensor& tensor) {
  return tensor.resolve_conj().resolve_neg();
}

at::Tensor tensor_of(const Tensor& leaf) {
  if (numel(leaf.shape) == 0) return at::empty(leaf.shape, scalar_type_of(leaf.dtype));
  if (!is_whole_in_memory(leaf))
    throw Error(ErrorCode::unsupported, "a tensor that is not one piece in memory");
  const auto& piece = leaf.pieces.front();
  const auto size = static_cast<std::int64_t>(size_of(leaf.dtype));
  const auto strides = piece.strides.empty() ? contiguous_strides(leaf.shape) : piece.strides;
  if (piece.storage->device) {
    return with_bits_of(piece, tensor_over(piece.storage->device,
                                           static_cast<std::uint64_t>(piece.storage_offset * size),
                                           leaf.shape, strides, scalar_type_of(leaf.dtype)));
  }
  return with_bits_of(piece, torch::from_blob(
                                 piece.storage->data + piece.storage_offset * size, leaf.shape,
                                 strides, [storage = piece.storage](void*) {},
                                 at::TensorOptions(scalar_type_of(leaf.dtype))));
}

Value to_value(const torch::Tensor& tensor) {
  require_defined("to_value", tensor);
  return leaf_of(tensor);
}

torch::Tensor to_tensor(const Value& value) {
  return tensor_of(value.as_tensor());
}

torch::Tensor to_tensor(const Tensor& tensor) {
  return tensor_of(tensor);
}

std::vector<torch::Tensor> local_tensors(const std::vector<ShardedParameter>& parameters) {
  std::vector<torch::Tensor> tensors;
  tensors.reserve(parameters.size());
  for (const auto& parameter : parameters) tensors.push_back(parameter.local);
  return tensors;
}

}  // namespace tessera
