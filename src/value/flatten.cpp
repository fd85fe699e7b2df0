// From a tree to named leaves and back, by PyTorch DCP's rule (checkpoint-rows P-10, P-11).
#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>
#include <unordered_set>

#include "tessera/error.h"
#include "tessera/leaf.h"
#include "value/children.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

// More holes than this are no list that somebody saved.
constexpr std::int64_t kMostHoles = 1 << 16;

std::optional<Value> optional_of(const Value* value) {
  return value == nullptr ? std::nullopt : std::optional(*value);
}

// The properties of a dict that names cannot say; null: nothing.
std::shared_ptr<const Container> container_of(const Value& dict) {
  Container made{dict.dict_kind(), optional_of(dict.container_state()),
                 optional_of(dict.default_factory())};
  if (made.kind == DictKind::dict && !made.state && !made.default_factory) return nullptr;
  return std::make_shared<const Container>(std::move(made));
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
    if (is_descended(value)) return descend(value);
    add(value);
  }

  [[nodiscard]] bool is_descended(const Value& value) const {
    if (value.is(Kind::dict)) return is_descended_dict(value);
    return value.is(Kind::list) && holds_tensor_or_dict(value);
  }

  [[nodiscard]] bool is_descended_dict(const Value& dict) const {
    if (empty_dicts_ && dict.size() == 0) return false;
    return rule_ == FlattenRule::current || holds_tensor_or_dict(dict);
  }

  void descend(const Value& container) {
    const bool dict = container.is(Kind::dict);
    containers_.push_back(dict ? container_of(container) : nullptr);
    const std::shared_ptr<const Containers> outer = std::exchange(shared_, shared());
    if (dict) {
      descend_pairs(container.pairs());
    } else {
      descend_items(container.items());
    }
    shared_ = outer;
    containers_.pop_back();
  }

  void descend_pairs(const std::vector<Value::Pair>& pairs) {
    for (const auto& [key, value] : pairs) {
      path_.push_back(step_of_key(key));
      visit(value);
      path_.pop_back();
    }
  }

  void descend_items(const Value::List& items) {
    std::int64_t index = 0;
    for (const Value& value : items) {
      path_.emplace_back(index++);
      visit(value);
      path_.pop_back();
    }
  }

  // The containers that all leaves of the innermost one share.
  [[nodiscard]] std::shared_ptr<const Containers> shared() const {
    const bool plain = std::all_of(containers_.begin(), containers_.end(),
                                   [](const auto& container) { return container == nullptr; });
    return plain ? nullptr : std::make_shared<const Containers>(containers_);
  }

  void add(const Value& value) { leaves_.push_back({dotted(path_), path_, value, shared_}); }

  // Whether a list (before torch 2.4: or a dict) is more than one leaf.
  [[nodiscard]] bool holds_tensor_or_dict(const Value& container) const {
    const auto splits = [this](const Value& value) { return is_tensor_or_dict(value); };
    if (container.is(Kind::dict))
      return std::ranges::any_of(container.pairs(), splits, &Value::Pair::second);
    return std::ranges::any_of(container.items(), splits);
  }

  // Or is a list, or before torch 2.4 a dict, that holds one.
  [[nodiscard]] bool is_tensor_or_dict(const Value& value) const {
    if (value.is(Kind::tensor)) return true;
    if (value.is(Kind::dict)) return rule_ == FlattenRule::current || holds_tensor_or_dict(value);
    return value.is(Kind::list) && holds_tensor_or_dict(value);
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
    const std::optional<Value> key = key_of_step(part);
    name += "[" + (key ? render(*key, std::size_t{1} << 20) : step_text(part)) + "]";
  }
  return name;
}

// The indices of leaves whose names others have too.
std::set<std::size_t> sharing_names(const std::vector<Leaf>& leaves) {
  std::unordered_map<std::string_view, std::size_t> first;
  std::set<std::size_t> shared;
  first.reserve(leaves.size());
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const auto [other, fresh] = first.emplace(leaves[i].name, i);
    if (!fresh) shared.insert({other->second, i});
  }
  return shared;
}

// Names by subscripts what shares its name. A new name may be that of another leaf, which then gets
// a new one too.
void tell_apart(std::vector<Leaf>& leaves) {
  for (bool changed = true; changed;) {
    changed = false;
    for (const std::size_t i : sharing_names(leaves)) {
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
    if (is_leaf_alone()) return leaves_.front().value;
    for (const Leaf& leaf : leaves_) put(leaf);
    for (const auto& [list, name] : lists_) require_no_hole(list, name);
    return root_ ? *root_ : Value::dict();
  }

 private:
  void require_no_hole(const Value& list, const std::string& name) const {
    for (const Value& item : list.items()) {
      if (is_hole(item)) {
        throw Error(ErrorCode::incomplete, "a list has no value for one of its indices")
            .at_key(printable(name));
      }
    }
  }

  // The tree is no container.
  [[nodiscard]] bool is_leaf_alone() const {
    return leaves_.size() == 1 && leaves_.front().path.empty() && leaves_.front().name.empty();
  }

  [[nodiscard]] bool is_hole(const Value& value) const {
    return value.identity() == hole_.identity();
  }

  void put(const Leaf& leaf) {
    if (leaf.path.empty()) {
      put_at(Path(1, leaf.name), leaf);
    } else {
      put_at(leaf.path, leaf);
    }
  }

  void put_at(const Path& path, const Leaf& leaf) {
    if (!root_) root_ = container_for(path, 0, leaf);
    Value at = *root_;
    for (std::size_t i = 0; i + 1 < path.size(); ++i) at = container_below(at, path, i, leaf);
    const Value* slot = slot_of(at, path.back(), leaf);
    if (slot == nullptr || !is_hole(*slot)) clash(leaf);
    assign(at, path.back(), leaf.value);
  }

  // The container to which `path[step]` leads from `container`; made when nothing is there yet.
  Value container_below(Value& container, const Path& path, std::size_t step, const Leaf& leaf) {
    const Value* slot = slot_of(container, path[step], leaf);
    if (slot != nullptr && containers_.contains(slot->identity())) return *slot;
    if (slot == nullptr || !is_hole(*slot)) clash(leaf);
    Value made = container_for(path, step + 1, leaf);
    assign(container, path[step], made);
    return made;
  }

  // The slot to which `part` leads from a container that was made here, the hole when nothing is
  // there yet, null when the container is of the other kind.
  const Value* slot_of(Value& container, const PathPart& part, const Leaf& leaf) {
    const auto* index = std::get_if<std::int64_t>(&part);
    if (index == nullptr) return container.is(Kind::dict) ? slot_of_key(container, part) : nullptr;
    return container.is(Kind::list) ? slot_of_index(container, *index, leaf) : nullptr;
  }

  const Value* slot_of_key(const Value& dict, const PathPart& part) {
    const auto* key = std::get_if<DictKey>(&part);
    const Value* found =
        key != nullptr ? dict.find_key(key->key) : dict.find(std::get<std::string>(part));
    return found == nullptr ? &hole_ : found;
  }

  const Value* slot_of_index(Value& list, std::int64_t index, const Leaf& leaf) {
    // Every index below a list's largest is a leaf too, so an index beyond the leaves leaves a
    // hole.
    if (index < 0 || static_cast<std::uint64_t>(index) >= leaves_.size()) {
      throw Error(ErrorCode::incomplete, "list index " + std::to_string(index) + " in a tree of " +
                                             std::to_string(leaves_.size()) + " leaves")
          .at_key(printable(leaf.name));
    }
    auto& items = list.items();
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
    const Container* like = container_at(leaf, step);
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

// A leaf below each list and the indices that there are, by the way to the list.
using Indices = std::map<std::string, std::pair<std::size_t, std::set<std::int64_t>>>;

// Those in the path of the leaf at `at`.
void add_indices(const Path& path, std::size_t at, Indices& lists) {
  std::string way;
  for (const PathPart& part : path) {
    if (const auto* index = std::get_if<std::int64_t>(&part)) {
      lists.try_emplace(way, at, std::set<std::int64_t>()).first->second.second.insert(*index);
    }
    way += step_text(part) + '\0';
  }
}

Indices indices_of(const std::vector<Leaf>& leaves) {
  Indices lists;
  const auto is_index = [](const PathPart& part) {
    return std::holds_alternative<std::int64_t>(part);
  };
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    if (std::ranges::any_of(leaves[i].path, is_index)) add_indices(leaves[i].path, i, lists);
  }
  return lists;
}

// An empty dict at `index` of the list at `path`, which `example` lies below too.
Leaf empty_dict_at(Path path, std::int64_t index, const Leaf& example) {
  Leaf leaf{"", std::move(path), Value::dict(), example.containers};
  leaf.path.emplace_back(index);
  leaf.name = dotted(leaf.path);
  return leaf;
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
      leaves.push_back(empty_dict_at(path, index, leaves[example]));
      added.push_back(leaves.back().name);
    }
  }
  return added;
}

Value unflatten(const std::vector<Leaf>& leaves) {
  return Unflattener(leaves).run();
}

}  // namespace tessera
