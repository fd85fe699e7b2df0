// Element types, in one table. Every format takes its names for them from it, in both directions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace [[gnu::visibility("default")]] tessera {

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

}  // namespace tessera
