#include "format/torch/names.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/checked.h"
#include "layout/strided.h"
#include "tessera/error.h"

namespace tessera::torch_file {
namespace {

constexpr std::array<std::pair<std::string_view, DType>, 6> kWithoutDType = {{
    {kUntyped, DType::uint8},
    {"QInt8Storage", DType::int8},
    {"QUInt8Storage", DType::uint8},
    {"QInt32Storage", DType::int32},
    {"QUInt4x2Storage", DType::uint8},
    {"QUInt2x4Storage", DType::uint8},
}};

bool are_counts(const Shape& numbers) {
  return std::ranges::all_of(numbers, [](std::int64_t number) { return number >= 0; });
}

bool is_possible(const View& view) {
  return view.strides.size() == view.shape.size() && view.offset >= 0 && are_counts(view.shape) &&
         are_counts(view.strides);
}

}  // namespace

StorageClass storage_class(std::string_view name) {
  for (const auto& [known, dtype] : kWithoutDType) {
    if (name == known) return {dtype, std::string(name)};
  }
  return {dtype_from_storage(name), {}};
}

bool is_storage_class(std::string_view name) noexcept {
  const auto is_known = [name](const auto& known) { return known.first == name; };
  return !name.empty() &&
         (std::ranges::any_of(kWithoutDType, is_known) ||
          std::ranges::find(dtype_table(), name, &DTypeInfo::storage) != dtype_table().end());
}

std::string_view class_name(DType dtype) {
  const std::string_view own = info(dtype).storage;
  return own.empty() ? kUntyped : own;
}

bool has_storage_class(DType dtype) {
  return !info(dtype).storage.empty();
}

std::string_view class_name(const Storage& storage) {
  return storage.torch_class.empty() ? class_name(storage.dtype) : storage.torch_class;
}

bool is_bare_storage(const Value& value) {
  return value.is(Value::Kind::tensor) && value.as_tensor().bare_storage;
}

Value class_global(std::string_view name) {
  return Value::global(name == kUntyped ? "torch.storage" : "torch", std::string(name));
}

Shape torch_strides(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (std::size_t d = shape.size(); d-- > 1;) {
    strides[d - 1] = checked_mul(strides[d], std::max<std::int64_t>(shape[d], 1));
  }
  return strides;
}

void require_inside(const View& view, DType dtype, std::uint64_t storage_size) {
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorCode::corrupt, what + ": offset " + std::to_string(view.offset) + ", shape " +
                                        to_string(view.shape) + ", strides " +
                                        to_string(view.strides));
  };
  if (view.shape.size() > kMaxDimensions) {
    throw Error(ErrorCode::limit,
                "a tensor of " + std::to_string(view.shape.size()) + " dimensions");
  }
  if (!is_possible(view)) fail("a tensor of impossible geometry");
  if (numel(view.shape) == 0) return;
  const std::int64_t last = checked_add(view.offset, strided_reach(view.shape, view.strides) - 1);
  if (static_cast<std::uint64_t>(last) >= storage_size / size_of(dtype)) {
    fail("a tensor that reaches element " + std::to_string(last) + " of a storage of " +
         std::to_string(storage_size / size_of(dtype)));
  }
}

}  // namespace tessera::torch_file
