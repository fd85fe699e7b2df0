#include <algorithm>
#include <array>
#include <string>

#include "base/numbers.h"
#include "tessera/error.h"
#include "tessera/layout.h"

namespace tessera {
namespace {

// F4 counts half bytes: a shape under that name has its last size doubled.
constexpr std::array kTable = {
    DTypeInfo{DType::float32, "float32", "FloatStorage", "F32", 4, true},
    DTypeInfo{DType::float64, "float64", "DoubleStorage", "F64", 8, true},
    DTypeInfo{DType::float16, "float16", "HalfStorage", "F16", 2, true},
    DTypeInfo{DType::bfloat16, "bfloat16", "BFloat16Storage", "BF16", 2, true},
    DTypeInfo{DType::int64, "int64", "LongStorage", "I64", 8, false},
    DTypeInfo{DType::int32, "int32", "IntStorage", "I32", 4, false},
    DTypeInfo{DType::int16, "int16", "ShortStorage", "I16", 2, false},
    DTypeInfo{DType::int8, "int8", "CharStorage", "I8", 1, false},
    DTypeInfo{DType::uint8, "uint8", "ByteStorage", "U8", 1, false},
    DTypeInfo{DType::bool8, "bool", "BoolStorage", "BOOL", 1, false},
    DTypeInfo{DType::uint16, "uint16", "", "U16", 2, false},
    DTypeInfo{DType::uint32, "uint32", "", "U32", 4, false},
    DTypeInfo{DType::uint64, "uint64", "", "U64", 8, false},
    DTypeInfo{DType::complex32, "complex32", "", "", 4, false},
    DTypeInfo{DType::complex64, "complex64", "ComplexFloatStorage", "C64", 8, false},
    DTypeInfo{DType::complex128, "complex128", "ComplexDoubleStorage", "", 16, false},
    DTypeInfo{DType::float8_e4m3fn, "float8_e4m3fn", "", "F8_E4M3", 1, true},
    DTypeInfo{DType::float8_e5m2, "float8_e5m2", "", "F8_E5M2", 1, true},
    DTypeInfo{DType::float8_e4m3fnuz, "float8_e4m3fnuz", "", "F8_E4M3FNUZ", 1, true},
    DTypeInfo{DType::float8_e5m2fnuz, "float8_e5m2fnuz", "", "F8_E5M2FNUZ", 1, true},
    DTypeInfo{DType::float8_e8m0fnu, "float8_e8m0fnu", "", "F8_E8M0", 1, true},
    DTypeInfo{DType::float4_e2m1fn_x2, "float4_e2m1fn_x2", "", "F4", 1, true},
};

DType lookup(std::string_view name, std::string_view DTypeInfo::*column, std::string_view what) {
  const auto* row = std::ranges::find(kTable, name, column);
  if (name.empty() || row == kTable.end()) {
    throw Error(ErrorCode::unsupported,
                "unknown " + std::string(what) + " '" + std::string(name) + "'");
  }
  return row->dtype;
}

}  // namespace

std::span<const DTypeInfo> dtype_table() noexcept {
  return kTable;
}

const DTypeInfo& info(DType dtype) noexcept {
  return kTable[static_cast<std::size_t>(dtype)];
}

DType dtype_from_torch(std::string_view name) {
  return lookup(name, &DTypeInfo::torch, "dtype");
}

DType dtype_from_storage(std::string_view name) {
  return lookup(name, &DTypeInfo::storage, "storage class");
}

DType dtype_from_safetensors(std::string_view name) {
  return lookup(name, &DTypeInfo::safetensors, "safetensors dtype");
}

namespace {

// Whether `size` slices from `begin` on are among the `limit` of a dimension.
bool fits(std::int64_t begin, std::int64_t size, std::int64_t limit) {
  return begin >= 0 && size >= 0 && begin <= limit && size <= limit - begin;
}

bool is_inside(const Box& box, const Shape& shape) {
  if (box.offsets.size() != shape.size() || box.sizes.size() != shape.size()) return false;
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (!fits(box.offsets[d], box.sizes[d], shape[d])) return false;
  }
  return true;
}

bool is_inside(const FlatRange& range, const Shape& shape) {
  return range.begin >= 0 && range.end >= range.begin && range.end <= numel(shape);
}

void require_no_negative_size(const Shape& shape) {
  if (std::ranges::any_of(shape, [](std::int64_t size) { return size < 0; })) {
    throw Error(ErrorCode::corrupt, "negative size in shape " + to_string(shape));
  }
}

}  // namespace

std::int64_t numel(const Shape& shape) {
  require_no_negative_size(shape);
  // A zero size makes the product zero whatever the others are, so look for it before multiplying.
  if (std::ranges::find(shape, 0) != shape.end()) return 0;
  std::int64_t product = 1;
  for (const std::int64_t size : shape) product = checked_mul(product, size);
  return product;
}

std::uint64_t byte_size(DType dtype, const Shape& shape) {
  return checked_mul<std::uint64_t>(static_cast<std::uint64_t>(numel(shape)), size_of(dtype));
}

std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (std::size_t d = 0; d < shape.size(); ++d) {
    if (d > 0) text += ", ";
    text += std::to_string(shape[d]);
  }
  return text + "]";
}

Shape contiguous_strides(const Shape& shape) {
  Shape strides(shape.size());
  std::int64_t stride = 1;
  for (std::size_t d = shape.size(); d-- > 0;) {
    strides[d] = stride;
    stride = checked_mul(stride, std::max<std::int64_t>(shape[d], 1));
  }
  return strides;
}

Box whole(const Shape& shape) {
  return Box{Shape(shape.size(), 0), shape};
}

std::int64_t numel(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) return numel(box->sizes);
  const FlatRange& range = std::get<FlatRange>(slice);
  return checked_sub(range.end, range.begin);
}

std::string to_string(const Slice& slice) {
  if (const Box* box = std::get_if<Box>(&slice)) {
    return to_string(box->sizes) + " at " + to_string(box->offsets);
  }
  const FlatRange& range = std::get<FlatRange>(slice);
  return "elements " + std::to_string(range.begin) + " to " + std::to_string(range.end);
}

void require_inside(const Slice& slice, const Shape& shape) {
  const bool inside =
      std::visit([&shape](const auto& part) { return is_inside(part, shape); }, slice);
  if (!inside) {
    throw Error(ErrorCode::corrupt, "slice " + to_string(slice) +
                                        " is not inside a tensor of shape " + to_string(shape));
  }
}

}  // namespace tessera
