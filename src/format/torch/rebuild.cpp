#include "format/torch/rebuild.h"

#include <algorithm>
#include <array>
#include <utility>

#include "base/numbers.h"
#include "base/text.h"
#include "layout/strided.h"
#include "tessera/error.h"
#include "value/equality.h"

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

// Classes that C++ names and Python does not have: torch.load refuses such a file of C++.
constexpr std::array<std::pair<std::string_view, DType>, 8> kOfCpp = {{
    {"Float8_e5m2Storage", DType::float8_e5m2},
    {"Float8_e4m3fnStorage", DType::float8_e4m3fn},
    {"Float8_e5m2fnuzStorage", DType::float8_e5m2fnuz},
    {"Float8_e4m3fnuzStorage", DType::float8_e4m3fnuz},
    {"Float8_e8m0fnuStorage", DType::float8_e8m0fnu},
    {"UInt16Storage", DType::uint16},
    {"UInt32Storage", DType::uint32},
    {"UInt64Storage", DType::uint64},
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
  for (const auto& [known, dtype] : kOfCpp)
    if (name == known) return {dtype, {}};
  return {dtype_from_storage(name), {}};
}

bool is_storage_class(std::string_view name) noexcept {
  const auto is_known = [name](const auto& known) { return known.first == name; };
  return !name.empty() &&
         (std::ranges::any_of(kWithoutDType, is_known) || std::ranges::any_of(kOfCpp, is_known) ||
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

void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

namespace {

using Kind = Value::Kind;

Shape shape_of(const Value& value) {
  if (!value.is(Kind::tuple)) corrupt("a tensor's size or stride is not a tuple");
  Shape shape;
  shape.reserve(value.size());
  for (const Value& item : value.items()) {
    if (!item.is(Kind::integer)) corrupt("a tensor's size or stride is not made of integers");
    shape.push_back(item.as_int());
  }
  return shape;
}

bool is_empty_ordered_dict(const Value& value) {
  return value.is(Kind::dict) && value.dict_kind() == DictKind::ordered_dict && value.size() == 0;
}

bool take_bit(const Value& name, const Value& bit, Piece& piece) {
  if (!name.is(Kind::string) || !bit.is(Kind::boolean)) return false;
  if (name.as_string() == "conj") {
    piece.conj = bit.as_bool();
  } else if (name.as_string() == "neg") {
    piece.neg = bit.as_bool();
  } else {
    return false;
  }
  return true;
}

// Sets conj and neg from the last argument; false when it says more than those.
bool take_bits(const Value& metadata, Piece& piece) {
  return metadata.is(Kind::dict) && std::ranges::all_of(metadata.pairs(), [&](const auto& pair) {
           return take_bit(pair.first, pair.second, piece);
         });
}

void require_arguments(const Value::List& arguments, std::size_t fixed) {
  if (!is_one_of(arguments.size(), fixed, fixed + 1)) corrupt("a tensor with arguments missing");
  if (!is_bare_storage(arguments[0])) corrupt("a tensor without a storage");
  if (!arguments[1].is(Kind::integer) || !arguments[4].is(Kind::boolean))
    corrupt("a tensor with arguments of wrong types");
}

// The dtype that v3 gives a tensor.
DType dtype_of(const Value& global) {
  if (!global.is(Kind::global) || global.global_module() != "torch")
    corrupt("a tensor without a dtype");
  return dtype_from_torch(global.global_name());
}

const std::shared_ptr<Storage>& storage_of(const Value::List& arguments) {
  return arguments[0].as_tensor().pieces[0].storage;
}

// Whether the storage is of the class that this rebuilder goes with, and there are no hooks.
bool is_usual(const Value::List& arguments, bool v3) {
  return storage_of(arguments)->torch_class == (v3 ? kUntyped : std::string_view()) &&
         is_empty_ordered_dict(arguments[5]);
}

// False: v3 says a dtype that has a storage class of its own.
bool take_dtype(const Value::List& arguments, bool v3, Tensor& tensor) {
  tensor.dtype = v3 ? dtype_of(arguments[6]) : storage_of(arguments)->dtype;
  return !v3 || class_name(tensor.dtype) == kUntyped;
}

void take_elements(const Value::List& arguments, Tensor& tensor, Piece piece) {
  const std::shared_ptr<Storage>& storage = storage_of(arguments);
  tensor.shape = shape_of(arguments[2]);
  Shape strides = shape_of(arguments[3]);
  const std::int64_t offset = arguments[1].as_int();
  require_inside({offset, tensor.shape, strides}, tensor.dtype, storage->size);
  if (strides == torch_strides(tensor.shape)) strides.clear();
  tensor.requires_grad = arguments[4].as_bool();
  piece.slice = whole(tensor.shape);
  piece.storage = storage;
  piece.storage_offset = offset;
  piece.strides = std::move(strides);
  tensor.pieces.push_back(std::move(piece));
}

// _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata]); v3 has the
// dtype before the metadata. False: a variant that stays an object node.
bool rebuild_plain(const Value::List& arguments, bool v3, Tensor& tensor) {
  const std::size_t fixed = v3 ? 7 : 6;
  require_arguments(arguments, fixed);
  Piece piece;
  if (!is_usual(arguments, v3)) return false;
  if (arguments.size() > fixed && !take_bits(arguments[fixed], piece)) return false;
  if (!take_dtype(arguments, v3, tensor)) return false;
  take_elements(arguments, tensor, std::move(piece));
  return true;
}

// Whether this is a tensor that nothing but its elements is said of: a parameter may be around it.
bool is_plain_tensor(const Value& value) {
  if (!value.is(Kind::tensor)) return false;
  const Tensor& tensor = value.as_tensor();
  return !tensor.bare_storage && !tensor.parameter && !tensor.attributes && !tensor.requires_grad &&
         !tensor.sharded;
}

// _rebuild_parameter(tensor, requires_grad, hooks[, state])
bool rebuild_parameter(const Value::List& arguments, bool with_state, Tensor& tensor) {
  if (arguments.size() != (with_state ? 4U : 3U)) corrupt("a parameter with arguments missing");
  const bool usual = is_plain_tensor(arguments[0]) && arguments[1].is(Kind::boolean) &&
                     is_empty_ordered_dict(arguments[2]);
  if (!usual) return false;
  tensor = arguments[0].as_tensor();
  tensor.parameter = true;
  tensor.requires_grad = arguments[1].as_bool();
  if (with_state) tensor.attributes = std::make_shared<const Value>(arguments[3]);
  return true;
}

// 2 or 3 for the two rebuilders of plain tensors, else 0.
int rebuilder_version(const Value& callable) {
  if (is_global(callable, "torch._utils", "_rebuild_tensor_v2")) return 2;
  return is_global(callable, "torch._utils", "_rebuild_tensor_v3") ? 3 : 0;
}

// _rebuild_from_type_v2(rebuilder, torch.Tensor, (...), attributes)
bool is_tensor_with_attributes(const Value& callable, const Value::List& arguments) {
  return is_global(callable, "torch._tensor", "_rebuild_from_type_v2") && arguments.size() == 4 &&
         rebuilder_version(arguments[0]) != 0 && is_global(arguments[1], "torch", "Tensor") &&
         arguments[2].is(Kind::tuple);
}

bool is_storage_id(const Value::List& items) {
  return begin_with(items,
                    {Kind::string, Kind::global, Kind::string, Kind::string, Kind::integer}) &&
         items[0].as_string() == "storage";
}

bool is_pair_of(const Value& pair, const Value& first, const Value& second) {
  return pair.items()[0].identity() == first.identity() &&
         pair.items()[1].identity() == second.identity();
}

bool rebuild(const Value& callable, const Value::List& arguments, Tensor& tensor) {
  if (const int version = rebuilder_version(callable))
    return rebuild_plain(arguments, version == 3, tensor);
  if (is_global(callable, "torch._utils", "_rebuild_parameter"))
    return rebuild_parameter(arguments, false, tensor);
  if (is_global(callable, "torch._utils", "_rebuild_parameter_with_state"))
    return rebuild_parameter(arguments, true, tensor);
  if (!is_tensor_with_attributes(callable, arguments)) return false;
  tensor.attributes = std::make_shared<const Value>(arguments[3]);
  return rebuild_plain(arguments[2].items(), rebuilder_version(arguments[0]) == 3, tensor);
}

}  // namespace

bool begin_with(const Value::List& items, std::initializer_list<Kind> kinds) {
  return std::equal(kinds.begin(), kinds.end(), items.begin(),
                    [](Kind kind, const Value& item) { return item.is(kind); });
}

bool rebuild_tensor(const Value& callable, const Value& given, Value& result) {
  if (!callable.is(Kind::global)) return false;
  Tensor tensor;
  const bool made = rebuild(callable, given.items(), tensor);
  if (made) result = Value(std::move(tensor));
  return made;
}

StorageId parse_storage_id(const Value& id, std::size_t parts) {
  if (!id.is(Kind::tuple) || id.size() != parts) {
    corrupt("a persistent id that is not a tuple of " + std::to_string(parts));
  }
  const Value::List& items = id.items();
  if (!is_storage_id(items)) corrupt("a persistent id that does not describe a storage");
  const std::string& module = items[1].global_module();
  if (!is_one_of(module, "torch", "torch.storage")) corrupt("a storage class of module " + module);
  return {storage_class(items[1].global_name()), items[2].as_string(), items[3].as_string(),
          items[4].as_int()};
}

Value bare_storage(StorageId id, Storage storage) {
  storage.location = std::move(id.location);
  storage.dtype = id.kept.dtype;
  storage.torch_class = std::move(id.kept.kept_name);
  Tensor leaf;
  leaf.dtype = storage.dtype;
  leaf.shape = {id.count};
  leaf.bare_storage = true;
  leaf.pieces = {{.slice = whole(leaf.shape),
                  .storage = std::make_shared<Storage>(std::move(storage)),
                  .strides = {}}};
  return Value(std::move(leaf));
}

bool is_of_class(const Storage& storage, const StorageClass& kept) {
  return storage.dtype == kept.dtype && storage.torch_class == kept.kept_name;
}

void require_same_storage(const Value& bare, const StorageId& id) {
  const Tensor& leaf = bare.as_tensor();
  const Storage& storage = *leaf.pieces[0].storage;
  if (!is_of_class(storage, id.kept) || leaf.shape[0] != id.count ||
      storage.location != id.location) {
    corrupt("storage '" + id.key + "' is described in two ways");
  }
}

std::shared_ptr<const Value> IdStrings::of(const Value& id) {
  const Value& storage = id.items()[0];
  const Value& location = id.items()[3];
  if (location.as_string().find(':') != std::string::npos) return nullptr;
  if (!latest_ || !is_pair_of(*latest_, storage, location))
    latest_ = std::make_shared<const Value>(Value::tuple({storage, location}));
  return latest_;
}

}  // namespace tessera::torch_file
