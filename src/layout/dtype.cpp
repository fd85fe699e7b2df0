#include "tessera/dtype.h"

#include <algorithm>
#include <array>
#include <string>

#include "tessera/error.h"

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

}  // namespace tessera
