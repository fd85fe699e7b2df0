// Which part of which tensor: shapes, boxes and ranges of elements.
//
// Pure integers: no I/O, no ranks, no libtorch. All counts are elements unless a name says bytes.
// Every function that combines numbers throws `limit` on overflow of 64 bits instead of wrapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

// Element types, in one table. Every format takes its names for them from it, in both directions.

enum class DType : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int64,
  int32,
  int16,
  int8,
  uint8,
  bool8,
  uint16,
  uint32,
  uint64,
  complex32,
  complex64,
  complex128,
  float8_e4m3fn,
  float8_e5m2,
  float8_e4m3fnuz,
  float8_e5m2fnuz,
  float8_e8m0fnu,
  float4_e2m1fn_x2,  // two values per byte; counts as one element of one byte, as in torch
};

struct DTypeInfo {
  DType dtype;
  std::string_view torch;  // attribute of the torch module: "float32"
  std::string_view
      storage;  // torch.save's storage class; empty: UntypedStorage with _rebuild_tensor_v3
  std::string_view safetensors;  // "F32"; empty: safetensors has no such type
  std::size_t size;              // bytes per element
  bool floating;                 // real floating point
};

// All rows, in enum order.
[[nodiscard]] std::span<const DTypeInfo> dtype_table() noexcept;
[[nodiscard]] const DTypeInfo& info(DType dtype) noexcept;
[[nodiscard]] inline std::size_t size_of(DType dtype) noexcept {
  return info(dtype).size;
}
[[nodiscard]] inline std::string_view to_string(DType dtype) noexcept {
  return info(dtype).torch;
}

// Each throws `unsupported` for a name that is in no row.
[[nodiscard]] DType dtype_from_torch(std::string_view name);
[[nodiscard]] DType dtype_from_storage(std::string_view name);
[[nodiscard]] DType dtype_from_safetensors(std::string_view name);

using Shape = std::vector<std::int64_t>;  // sizes, outermost first; empty: a scalar of one element

// Product of the sizes; throws `limit` on overflow and `corrupt` on a negative size.
[[nodiscard]] std::int64_t numel(const Shape& shape);
// Bytes of a dense tensor. Throws as numel does.
[[nodiscard]] std::uint64_t byte_size(DType dtype, const Shape& shape);
[[nodiscard]] std::string to_string(const Shape& shape);  // "[3, 4]"
// Row-major strides of `shape`.
[[nodiscard]] Shape contiguous_strides(const Shape& shape);

// A rectangle of a tensor: `sizes[d]` elements from `offsets[d]` in each dimension.
struct Box {
  Shape offsets;
  Shape sizes;
  bool operator==(const Box&) const = default;
};

// Elements [begin, end) of a tensor in row-major order, as FSDP1 shards hold them.
struct FlatRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool operator==(const FlatRange&) const = default;
};

using Slice = std::variant<Box, FlatRange>;

// A slice of a tensor and where its elements lie in an array: row-major, from element `base` on.
struct Part {
  Slice slice;
  std::int64_t base = 0;
};

// How a tensor is cut over the ranks of a group, by a rule from which every rank knows what each
// other rank holds. Rank r holds part (r / stride) % parts; ranks with the same part hold the same.
struct Placement {
  int parts = 1;   // 1: every rank holds the whole tensor
  int stride = 1;  // ranks in a row that hold the same part
  // The dimension that torch.chunk's rule cuts, if `shard` is 0.
  int dim = 0;
  // Otherwise the tensor is a member of a flat parameter (FSDP1) that is cut into parts of `shard`
  // elements: the tensor's first element is number `begin` of the flat parameter.
  std::int64_t shard = 0;
  std::int64_t begin = 0;
  bool operator==(const Placement&) const = default;
};

// A parameter inside of a flat parameter (FSDP1), and the part of it that a rank's shard holds.
struct FlatMember {
  std::string name;
  Shape shape;               // of the whole parameter
  FlatRange range;           // the parameter's elements that are held; empty: none
  std::int64_t base = 0;     // place of `range`'s first element in the shard, in elements
  Placement placement = {};  // what each rank holds, if that is known
};

[[nodiscard]] Box whole(const Shape& shape);
[[nodiscard]] std::int64_t numel(const Slice& slice);
[[nodiscard]] std::string to_string(const Slice& slice);
// Throws `corrupt`, naming both, if the slice does not lie inside `shape`.
void require_inside(const Slice& slice, const Shape& shape);

}  // namespace tessera
