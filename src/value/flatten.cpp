// From a tree to named leaves and back, by PyTorch DCP's rule (spec P-10, P-11).
#include <unordered_set>

#include "tessera/error.h"
#include "tessera/value.h"
#include "value/depth.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

class Flattener {
 public:
  explicit Flattener(FlattenRule rule) : rule_(rule) {}

  std::vector<Leaf> run(const Value& tree) && {
    require_walkable(tree);
    // The outermost dict is always descended, under either rule.
    if (tree.is(Kind::dict)) {
      descend(tree);
    } else {
      visit(tree);
    }
    require_unique();
    return std::move(leaves_);
  }

 private:
  void visit(const Value& value) {
    const bool dict = value.is(Kind::dict);
    if (!dict && !value.is(Kind::list)) return add(value);
    if (dict && rule_ == FlattenRule::current) return descend(value);
    if (holds_tensor_or_dict(value)) return descend(value);
    add(value);
  }

  void descend(const Value& container) {
    if (container.is(Kind::dict)) {
      for (const auto& [key, value] : container.pairs()) {
        path_.emplace_back(key_text(key));
        visit(value);
        path_.pop_back();
      }
      return;
    }
    std::int64_t index = 0;
    for (const Value& value : container.items()) {
      path_.emplace_back(index++);
      visit(value);
      path_.pop_back();
    }
  }

  void add(const Value& value) { leaves_.push_back({dotted(path_), path_, value}); }

  // Whether a list (before torch 2.4: or a dict) is more than one leaf.
  bool holds_tensor_or_dict(const Value& container) const {
    const auto splits = [this](const Value& value) {
      if (value.is(Kind::tensor)) return true;
      if (value.is(Kind::dict)) {
        return rule_ == FlattenRule::current || holds_tensor_or_dict(value);
      }
      return value.is(Kind::list) && holds_tensor_or_dict(value);
    };
    if (container.is(Kind::dict)) {
      for (const auto& pair : container.pairs()) {
        if (splits(pair.second)) return true;
      }
      return false;
    }
    for (const Value& value : container.items()) {
      if (splits(value)) return true;
    }
    return false;
  }

  void require_unique() const {
    std::unordered_set<std::string_view> names;
    names.reserve(leaves_.size());
    for (const Leaf& leaf : leaves_) {
      if (!names.insert(leaf.name).second) {
        throw Error(ErrorCode::conflict, "two leaves of the tree have this name, expected one")
            .at_key(printable(leaf.name));
      }
    }
  }

  FlattenRule rule_;
  Path path_;
  std::vector<Leaf> leaves_;
};

class Unflattener {
 public:
  explicit Unflattener(const std::vector<Leaf>& leaves) : leaves_(leaves) {}

  Value run() && {
    for (const Leaf& leaf : leaves_) {
      if (leaf.path.empty() && leaf.name.empty() && leaves_.size() == 1) return leaf.value;
      if (leaf.path.empty()) {
        put(leaf, Path(1, leaf.name));
      } else {
        put(leaf, leaf.path);
      }
    }
    for (const auto& [list, name] : lists_) {
      for (const Value& item : list.items()) {
        if (item.identity() == hole_.identity()) {
          throw Error(ErrorCode::incomplete, "a list has no value for one of its indices")
              .at_key(printable(name));
        }
      }
    }
    return root_ ? *root_ : Value::dict();
  }

 private:
  void put(const Leaf& leaf, const Path& path) {
    if (!root_) root_ = container_for(path.front(), leaf);
    Value at = *root_;
    for (std::size_t i = 0; i < path.size(); ++i) {
      Value* slot = slot_of(at, path[i], leaf);
      const bool last = i + 1 == path.size();
      if (slot == nullptr || (!last && slot->identity() != hole_.identity() &&
                              containers_.count(slot->identity()) == 0)) {
        clash(leaf);
      }
      if (last) {
        if (slot->identity() != hole_.identity()) clash(leaf);
        assign(at, path[i], leaf.value);
        return;
      }
      Value next = slot->identity() == hole_.identity() ? container_for(path[i + 1], leaf) : *slot;
      assign(at, path[i], next);
      at = std::move(next);
    }
  }

  // Where `part` leads from a container that was made here, the hole when nothing is there yet,
  // null when the container is of the other kind.
  Value* slot_of(Value& container, const PathPart& part, const Leaf& leaf) {
    if (const auto* key = std::get_if<std::string>(&part)) {
      if (!container.is(Kind::dict)) return nullptr;
      const Value* found = container.find(*key);
      return found == nullptr ? &hole_ : const_cast<Value*>(found);
    }
    if (!container.is(Kind::list)) return nullptr;
    const std::int64_t index = std::get<std::int64_t>(part);
    // Every index below a list's largest is a leaf too, so an index beyond the leaves leaves a
    // hole.
    if (index < 0 || static_cast<std::uint64_t>(index) >= leaves_.size()) {
      throw Error(ErrorCode::incomplete, "list index " + std::to_string(index) + " in a tree of " +
                                             std::to_string(leaves_.size()) + " leaves")
          .at_key(printable(leaf.name));
    }
    auto& items = container.items();
    if (items.size() <= static_cast<std::size_t>(index)) {
      items.resize(static_cast<std::size_t>(index) + 1, hole_);
    }
    return &items[static_cast<std::size_t>(index)];
  }

  static void assign(Value& container, const PathPart& part, const Value& value) {
    if (const auto* key = std::get_if<std::string>(&part)) {
      container.set_item(Value(*key), value);
    } else {
      container.items()[static_cast<std::size_t>(std::get<std::int64_t>(part))] = value;
    }
  }

  Value container_for(const PathPart& part, const Leaf& leaf) {
    const bool list = std::holds_alternative<std::int64_t>(part);
    Value made = list ? Value::list() : Value::dict();
    if (list) lists_.emplace_back(made, leaf.name);
    containers_.insert(made.identity());
    return made;
  }

  [[noreturn]] static void clash(const Leaf& leaf) {
    throw Error(ErrorCode::conflict, "the path of this leaf runs through or ends at another one")
        .at_key(printable(leaf.name));
  }

  const std::vector<Leaf>& leaves_;
  std::optional<Value> root_;
  Value hole_ = Value::list();                        // stands for a value that is not there yet
  std::unordered_set<const void*> containers_;        // nodes made here, as against leaves
  std::vector<std::pair<Value, std::string>> lists_;  // made here, and a leaf below each
};

}  // namespace

std::string dotted(const Path& path) {
  std::string name;
  for (const PathPart& part : path) {
    if (&part != &path.front()) name += '.';
    if (const auto* key = std::get_if<std::string>(&part)) {
      name += *key;
    } else {
      name += std::to_string(std::get<std::int64_t>(part));
    }
  }
  return name;
}

std::vector<Leaf> flatten(const Value& tree, FlattenRule rule) {
  return Flattener(rule).run(tree);
}

Value unflatten(const std::vector<Leaf>& leaves) {
  return Unflattener(leaves).run();
}

}  // namespace tessera
