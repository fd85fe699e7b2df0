// From a tree to named leaves and back, by PyTorch DCP's rule (spec P-10, P-11).
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "tessera/error.h"
#include "tessera/leaf.h"
#include "value/depth.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

// More holes than this are no list that somebody saved.
constexpr std::int64_t kMostHoles = 1 << 16;

// What names cannot say of a dict; null: nothing.
std::shared_ptr<const Container> container_of(const Value& dict) {
  const Value* state = dict.container_state();
  const Value* factory = dict.default_factory();
  if (dict.dict_kind() == DictKind::dict && state == nullptr && factory == nullptr) return nullptr;
  Container made{dict.dict_kind()};
  if (state != nullptr) made.state = *state;
  if (factory != nullptr) made.default_factory = *factory;
  return std::make_shared<const Container>(std::move(made));
}

PathPart part_of(const Value& key) {
  if (key.is(Kind::string)) return key.as_string();
  return DictKey{key_text(key), key};
}

class Flattener {
 public:
  // `empty_dicts`: they are leaves.
  explicit Flattener(FlattenRule rule, bool empty_dicts = false)
      : rule_(rule), empty_dicts_(empty_dicts) {}

  std::vector<Leaf> run(const Value& tree) && {
    require_walkable(tree);
    // The outermost dict is always descended, under either rule.
    if (tree.is(Kind::dict)) {
      descend(tree);
    } else {
      visit(tree);
    }
    return std::move(leaves_);
  }

 private:
  void visit(const Value& value) {
    const bool dict = value.is(Kind::dict);
    if (!dict && !value.is(Kind::list)) return add(value);
    if (dict && empty_dicts_ && value.size() == 0) return add(value);
    if (dict && rule_ == FlattenRule::current) return descend(value);
    if (holds_tensor_or_dict(value)) return descend(value);
    add(value);
  }

  void descend(const Value& container) {
    const bool dict = container.is(Kind::dict);
    containers_.push_back(dict ? container_of(container) : nullptr);
    const std::shared_ptr<const Containers> outer = std::exchange(shared_, shared());
    if (dict) {
      for (const auto& [key, value] : container.pairs()) {
        path_.push_back(part_of(key));
        visit(value);
        path_.pop_back();
      }
    } else {
      std::int64_t index = 0;
      for (const Value& value : container.items()) {
        path_.emplace_back(index++);
        visit(value);
        path_.pop_back();
      }
    }
    shared_ = outer;
    containers_.pop_back();
  }

  // What all leaves of the innermost container have.
  [[nodiscard]] std::shared_ptr<const Containers> shared() const {
    const bool plain = std::all_of(containers_.begin(), containers_.end(),
                                   [](const auto& container) { return container == nullptr; });
    return plain ? nullptr : std::make_shared<const Containers>(containers_);
  }

  void add(const Value& value) { leaves_.push_back({dotted(path_), path_, value, shared_}); }

  // Whether a list (before torch 2.4: or a dict) is more than one leaf.
  bool holds_tensor_or_dict(const Value& container) const {
    const auto splits = [this](const Value& value) {
      if (value.is(Kind::tensor)) return true;
      if (value.is(Kind::dict)) {
        return rule_ == FlattenRule::current || holds_tensor_or_dict(value);
      }
      return value.is(Kind::list) && holds_tensor_or_dict(value);
    };
    if (container.is(Kind::dict))
      return std::ranges::any_of(container.pairs(), splits, &Value::Pair::second);
    return std::ranges::any_of(container.items(), splits);
  }

  FlattenRule rule_;
  bool empty_dicts_;
  Path path_;
  Containers containers_;                     // on the way, as Leaf::containers
  std::shared_ptr<const Containers> shared_;  // the same, of the leaves that are met now
  std::vector<Leaf> leaves_;
};

void require_unique(const std::vector<Leaf>& leaves) {
  std::unordered_set<std::string_view> names;
  names.reserve(leaves.size());
  for (const Leaf& leaf : leaves) {
    if (!names.insert(leaf.name).second) {
      throw Error(ErrorCode::conflict, "two leaves of the tree have this name, expected one")
          .at_key(printable(leaf.name));
    }
  }
}

// The path as Python's subscripts: no two paths of a tree have the same.
std::string subscripts(const Path& path) {
  std::string name;
  for (const PathPart& part : path) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      name += "[" + std::to_string(*index) + "]";
      continue;
    }
    const auto* key = std::get_if<DictKey>(&part);
    const Value value = key != nullptr ? key->key : Value(std::get<std::string>(part));
    name += "[" + render(value, std::size_t{1} << 20) + "]";
  }
  return name;
}

// Names by subscripts what shares its name. A new name may be that of another leaf, which then gets
// a new one too.
void tell_apart(std::vector<Leaf>& leaves) {
  for (bool changed = true; changed;) {
    changed = false;
    std::unordered_map<std::string_view, std::size_t> first;
    std::set<std::size_t> shared;
    first.reserve(leaves.size());
    for (std::size_t i = 0; i < leaves.size(); ++i) {
      const auto [other, fresh] = first.emplace(leaves[i].name, i);
      if (!fresh) shared.insert({other->second, i});
    }
    first.clear();
    for (const std::size_t i : shared) {
      std::string name = subscripts(leaves[i].path);
      changed = changed || name != leaves[i].name;
      leaves[i].name = std::move(name);
    }
  }
}

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
    for (const auto& [list, name] : lists_) require_no_hole(list, name);
    return root_ ? *root_ : Value::dict();
  }

 private:
  void require_no_hole(const Value& list, const std::string& name) const {
    for (const Value& item : list.items()) {
      if (item.identity() == hole_.identity()) {
        throw Error(ErrorCode::incomplete, "a list has no value for one of its indices")
            .at_key(printable(name));
      }
    }
  }

  void put(const Leaf& leaf, const Path& path) {
    if (!root_) root_ = container_for(path, 0, leaf);
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
      Value next = slot->identity() == hole_.identity() ? container_for(path, i + 1, leaf) : *slot;
      assign(at, path[i], next);
      at = std::move(next);
    }
  }

  // Where `part` leads from a container that was made here, the hole when nothing is there yet,
  // null when the container is of the other kind.
  Value* slot_of(Value& container, const PathPart& part, const Leaf& leaf) {
    const auto* number = std::get_if<std::int64_t>(&part);
    if (number == nullptr) {
      if (!container.is(Kind::dict)) return nullptr;
      const auto* key = std::get_if<DictKey>(&part);
      const Value* found = key != nullptr ? container.find_key(key->key)
                                          : container.find(std::get<std::string>(part));
      return found == nullptr ? &hole_ : const_cast<Value*>(found);
    }
    if (!container.is(Kind::list)) return nullptr;
    const std::int64_t index = *number;
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
    } else if (const auto* odd = std::get_if<DictKey>(&part)) {
      container.set_item(odd->key, value);
    } else {
      container.items()[static_cast<std::size_t>(std::get<std::int64_t>(part))] = value;
    }
  }

  // The container that has `path[step]`.
  static Value dict_for(const Leaf& leaf, std::size_t step) {
    const bool known = leaf.containers && step < leaf.containers->size();
    const Container* like = known ? (*leaf.containers)[step].get() : nullptr;
    if (like == nullptr) return Value::dict();
    Value made = Value::dict({}, like->kind);
    if (like->state) made.set_container_state(*like->state);
    if (like->default_factory) made.set_default_factory(*like->default_factory);
    return made;
  }

  Value container_for(const Path& path, std::size_t step, const Leaf& leaf) {
    const bool list = std::holds_alternative<std::int64_t>(path[step]);
    Value made = list ? Value::list() : dict_for(leaf, step);
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

// By the way to a list: a leaf below it, and the indices that there are.
using Indices = std::map<std::string, std::pair<std::size_t, std::set<std::int64_t>>>;

Indices indices_of(const std::vector<Leaf>& leaves) {
  Indices lists;
  const auto is_index = [](const PathPart& part) {
    return std::holds_alternative<std::int64_t>(part);
  };
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (std::ranges::none_of(leaves[i].path, is_index)) continue;
    std::string way;
    for (const PathPart& part : leaves[i].path) {
      if (const auto* index = std::get_if<std::int64_t>(&part)) {
        lists.try_emplace(way, i, std::set<std::int64_t>()).first->second.second.insert(*index);
      }
      way += step_text(part) + '\0';
    }
  }
  return lists;
}

}  // namespace

std::string step_text(const PathPart& part) {
  if (const auto* key = std::get_if<std::string>(&part)) return *key;
  if (const auto* key = std::get_if<DictKey>(&part)) return key->text;
  return std::to_string(std::get<std::int64_t>(part));
}

std::string dotted(const Path& path) {
  std::string name;
  for (const PathPart& part : path) {
    if (&part != &path.front()) name += '.';
    name += step_text(part);
  }
  return name;
}

std::vector<Leaf> flatten(const Value& tree, FlattenRule rule) {
  std::vector<Leaf> leaves = Flattener(rule).run(tree);
  require_unique(leaves);
  return leaves;
}

std::vector<Leaf> leaves_of(const Value& tree) {
  std::vector<Leaf> leaves = Flattener(FlattenRule::current, true).run(tree);
  tell_apart(leaves);
  return leaves;
}

std::vector<std::string> fill_holes(std::vector<Leaf>& leaves) {
  std::vector<std::string> added;
  std::int64_t left = kMostHoles;
  for (const auto& [way, list] : indices_of(leaves)) {
    const auto& [example, indices] = list;
    const std::int64_t holes = *indices.rbegin() + 1 - std::ssize(indices);
    if (*indices.begin() < 0 || holes <= 0 || holes > left) continue;
    left -= holes;
    const auto depth = std::count(way.begin(), way.end(), '\0');
    const Path path(leaves[example].path.begin(), leaves[example].path.begin() + depth);
    for (std::int64_t index = 0; index < *indices.rbegin(); ++index) {
      if (indices.contains(index)) continue;
      Leaf leaf{"", path, Value::dict(), leaves[example].containers};
      leaf.path.emplace_back(index);
      leaf.name = dotted(leaf.path);
      added.push_back(leaf.name);
      leaves.push_back(std::move(leaf));
    }
  }
  return added;
}

Value unflatten(const std::vector<Leaf>& leaves) {
  return Unflattener(leaves).run();
}

}  // namespace tessera
