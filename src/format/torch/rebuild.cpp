#include "format/torch/rebuild.h"

#include <utility>

#include "tessera/error.h"

namespace tessera::torch_file {
namespace {

using Kind = Value::Kind;

[[noreturn]] void corrupt(std::string what) {
  throw Error(ErrorCode::corrupt, std::move(what));
}

bool is_global(const Value& value, std::string_view module, std::string_view name) {
  return value.is(Kind::global) && value.global_module() == module && value.global_name() == name;
}

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

// Sets conj and neg from the last argument; false when it says more than those.
bool take_bits(const Value& metadata, Piece& piece) {
  if (!metadata.is(Kind::dict)) return false;
  for (const auto& [key, value] : metadata.pairs()) {
    if (!key.is(Kind::string) || !value.is(Kind::boolean)) return false;
    if (key.as_string() == "conj") {
      piece.conj = value.as_bool();
    } else if (key.as_string() == "neg") {
      piece.neg = value.as_bool();
    } else {
      return false;
    }
  }
  return true;
}

void require_arguments(const Value::List& arguments, std::size_t fixed) {
  if (arguments.size() != fixed && arguments.size() != fixed + 1)
    corrupt("a tensor with arguments missing");
  if (!arguments[0].is(Kind::tensor) || !arguments[0].as_tensor().bare_storage)
    corrupt("a tensor without a storage");
  if (!arguments[1].is(Kind::integer) || !arguments[4].is(Kind::boolean))
    corrupt("a tensor with arguments of wrong types");
}

// The dtype that v3 gives a tensor.
DType dtype_of(const Value& global) {
  if (!global.is(Kind::global) || global.global_module() != "torch")
    corrupt("a tensor without a dtype");
  return dtype_from_torch(global.global_name());
}

// _rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks[, metadata]); v3 has the
// dtype before the metadata. False: a variant that stays an object node.
bool rebuild_plain(const Value::List& arguments, bool v3, Tensor& tensor) {
  const std::size_t fixed = v3 ? 7 : 6;
  require_arguments(arguments, fixed);
  const std::shared_ptr<Storage>& storage = arguments[0].as_tensor().pieces[0].storage;
  if (storage->torch_class != (v3 ? kUntyped : std::string_view())) return false;
  if (!is_empty_ordered_dict(arguments[5])) return false;
  Piece piece;
  if (arguments.size() > fixed && !take_bits(arguments[fixed], piece)) return false;
  tensor.dtype = v3 ? dtype_of(arguments[6]) : storage->dtype;
  if (v3 && class_name(tensor.dtype) != kUntyped) return false;
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
  return true;
}

// _rebuild_parameter(tensor, requires_grad, hooks[, state])
bool rebuild_parameter(const Value::List& arguments, bool with_state, Tensor& tensor) {
  if (arguments.size() != (with_state ? 4U : 3U)) corrupt("a parameter with arguments missing");
  if (!arguments[0].is(Kind::tensor) || arguments[0].as_tensor().bare_storage ||
      !arguments[1].is(Kind::boolean))
    return false;
  tensor = arguments[0].as_tensor();
  if (tensor.parameter || tensor.attributes || tensor.requires_grad ||
      !is_empty_ordered_dict(arguments[2]))
    return false;
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
  return items[0].is(Kind::string) && items[0].as_string() == "storage" &&
         items[1].is(Kind::global) && items[2].is(Kind::string) && items[3].is(Kind::string) &&
         items[4].is(Kind::integer);
}

}  // namespace

bool rebuild_tensor(const Value& callable, const Value& given, Value& result) {
  if (!callable.is(Kind::global)) return false;
  const Value::List& arguments = given.items();
  Tensor tensor;
  bool made = false;
  if (const int version = rebuilder_version(callable)) {
    made = rebuild_plain(arguments, version == 3, tensor);
  } else if (is_global(callable, "torch._utils", "_rebuild_parameter")) {
    made = rebuild_parameter(arguments, false, tensor);
  } else if (is_global(callable, "torch._utils", "_rebuild_parameter_with_state")) {
    made = rebuild_parameter(arguments, true, tensor);
  } else if (is_tensor_with_attributes(callable, arguments)) {
    made = rebuild_plain(arguments[2].items(), rebuilder_version(arguments[0]) == 3, tensor);
    tensor.attributes = std::make_shared<const Value>(arguments[3]);
  }
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
  if (module != "torch" && module != "torch.storage")
    corrupt("a storage class of module " + module);
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

void require_same_storage(const Value& bare, const StorageId& id) {
  const Tensor& leaf = bare.as_tensor();
  const Storage& storage = *leaf.pieces[0].storage;
  if (storage.dtype != id.kept.dtype || storage.torch_class != id.kept.kept_name ||
      leaf.shape[0] != id.count || storage.location != id.location) {
    corrupt("storage '" + id.key + "' is described in two ways");
  }
}

std::shared_ptr<const Value> IdStrings::of(const Value& id) {
  const Value& storage = id.items()[0];
  const Value& location = id.items()[3];
  if (location.as_string().find(':') != std::string::npos) return nullptr;
  const bool same = latest_ && latest_->items()[0].identity() == storage.identity() &&
                    latest_->items()[1].identity() == location.identity();
  if (!same) latest_ = std::make_shared<const Value>(Value::tuple({storage, location}));
  return latest_;
}

}  // namespace tessera::torch_file
