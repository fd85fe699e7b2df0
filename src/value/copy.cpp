#include "value/copy.h"

#include <unordered_map>
#include <utility>

#include "value/children.h"
#include "value/depth.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

class Copier {
 public:
  explicit Copier(const Replacement& replacement) : replacement_(replacement) {}

  Value copy(const Value& value) {
    if (!is_changeable(value)) return value;
    if (const auto known = made_.find(value.identity()); known != made_.end()) return known->second;
    std::optional<Value> given;
    if (replacement_) given = replacement_(value);
    Value made = given ? std::move(*given) : copy_node(value);
    return made_.emplace(value.identity(), std::move(made)).first->second;
  }

 private:
  // Others are never changed in place: both trees may hold them.
  static bool is_changeable(const Value& value) {
    return is_container(value.kind()) || value.is(Kind::tensor);
  }

  Value copy_node(const Value& value) {
    switch (value.kind()) {
      case Kind::list:
        return Value::list(copy_all(value.items()));
      case Kind::tuple:
        return Value::tuple(copy_all(value.items()));
      case Kind::set:
        return Value::set(copy_all(value.items()));
      case Kind::frozenset:
        return Value::frozenset(copy_all(value.items()));
      case Kind::dict:
        return copy_dict(value);
      case Kind::tensor:
        return copy_tensor(value.as_tensor());
      default:
        return copy_object(value.as_object());
    }
  }

  std::vector<Value> copy_all(const std::vector<Value>& values) {
    std::vector<Value> made;
    made.reserve(values.size());
    for (const Value& value : values) made.push_back(copy(value));
    return made;
  }

  std::vector<Value::Pair> copy_pairs(const std::vector<Value::Pair>& pairs) {
    std::vector<Value::Pair> made;
    made.reserve(pairs.size());
    for (const auto& [key, value] : pairs) made.emplace_back(copy(key), copy(value));
    return made;
  }

  [[gnu::noinline]] Value copy_dict(const Value& value) {
    Value made = Value::dict(copy_pairs(value.pairs()), value.dict_kind());
    if (const Value* state = value.container_state()) made.set_container_state(copy(*state));
    if (const Value* factory = value.default_factory()) made.set_default_factory(copy(*factory));
    return made;
  }

  std::shared_ptr<Storage> copy_storage(const Storage& storage) {
    auto& made = storages_[&storage];
    if (!made) made = std::make_shared<Storage>(storage);
    return made;
  }

  [[gnu::noinline]] Value copy_tensor(Tensor tensor) {
    for (Piece& piece : tensor.pieces) {
      if (piece.storage) piece.storage = copy_storage(*piece.storage);
    }
    if (tensor.attributes)
      tensor.attributes = std::make_shared<const Value>(copy(*tensor.attributes));
    return Value(std::move(tensor));
  }

  [[gnu::noinline]] Value copy_object(Object object) {
    object.callable = copy(object.callable);
    object.arguments = copy(object.arguments);
    if (object.keywords) object.keywords = copy(*object.keywords);
    if (object.state) object.state = copy(*object.state);
    object.list_items = copy_all(object.list_items);
    object.dict_items = copy_pairs(object.dict_items);
    return Value::object(std::move(object));
  }

  const Replacement& replacement_;
  std::unordered_map<const void*, Value> made_;  // by the node that it stands for
  std::unordered_map<const Storage*, std::shared_ptr<Storage>> storages_;
};

}  // namespace

Value Value::clone() const {
  require_walkable(*this);
  return copy_tree(*this);
}

Value copy_tree(const Value& tree, const Replacement& replacement) {
  return Copier(replacement).copy(tree);
}

}  // namespace tessera
