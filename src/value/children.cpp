#include "value/children.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

// Calls visit(child, name) for the children that may hold others.
template <typename Visit>
void for_each_container(const Value& value, Visit visit) {
  for_each_child(value, [&visit](const Value& child, const auto& name) {
    if (holds_others(child)) visit(child, name);
  });
}

std::vector<const Value*> containers_in(const Value& value) {
  std::vector<const Value*> children;
  for_each_container(value, [&](const Value& child, const auto&) { children.push_back(&child); });
  return children;
}

// A walk that keeps its way on the heap.
class DepthWalk {
 public:
  void run(const Value& root) {
    enter(root);
    while (!way_.empty()) {
      Step& step = way_.back();
      if (step.next < step.children.size()) {
        enter(*step.children[step.next++]);
        continue;
      }
      const std::size_t levels = step.levels + 1;
      levels_[step.value->identity()] = levels;
      way_.pop_back();
      note_levels(levels);
    }
  }

 private:
  static constexpr std::size_t kOpen = 0;   // of a node on the way
  static constexpr std::size_t kNamed = 8;  // steps that a message names

  struct Step {
    const Value* value;
    std::vector<const Value*> children;
    std::size_t next = 0;
    std::size_t levels = 0;  // below it, as far as known
  };

  void enter(const Value& value) {
    const auto [known, is_new] = levels_.emplace(value.identity(), kOpen);
    if (!is_new && known->second == kOpen && value.identity() != nullptr) {
      throw Error(ErrorCode::invalid_argument, "the value contains itself").at_key(place());
    }
    const std::size_t below = is_new ? 1 : known->second;
    require_levels(below);
    if (!is_new) return note_levels(below);
    way_.push_back({&value, containers_in(value)});
  }

  void require_levels(std::size_t below) const {
    if (way_.size() + below <= kMaxLevels) return;
    throw Error(ErrorCode::limit,
                "values are nested deeper than " + std::to_string(kMaxLevels) + " levels")
        .at_key(place());
  }

  // What the node before the one that was met last has below it.
  void note_levels(std::size_t levels) {
    if (!way_.empty()) way_.back().levels = std::max(way_.back().levels, levels);
  }

  // The first steps to where the walk is.
  [[nodiscard]] std::string place() const {
    std::string text;
    for (std::size_t i = 0; i < std::min(way_.size(), kNamed); ++i) {
      const Value* taken = way_[i].children[way_[i].next - 1];
      for_each_container(*way_[i].value, [&](const Value& child, const auto& name) {
        if (&child == taken) text += (text.empty() ? "" : ".") + name();
      });
    }
    return printable(text) + (way_.size() > kNamed ? "..." : "");
  }

  std::vector<Step> way_;
  std::unordered_map<const void*, std::size_t> levels_;  // by node: its levels, or kOpen
};

}  // namespace

void require_walkable(const Value& value) {
  DepthWalk().run(value);
}

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
