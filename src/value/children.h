// The children of values: the kinds that hold others, and the way to each child.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "tessera/leaf.h"
#include "tessera/value.h"
#include "value/render.h"

namespace tessera {

// Holds its children in items().
[[nodiscard]] constexpr bool is_sequence(Value::Kind kind) {
  using Kind = Value::Kind;
  return kind == Kind::list || kind == Kind::tuple || kind == Kind::set || kind == Kind::frozenset;
}

// Holds other values; a tensor does so too when it has attributes.
[[nodiscard]] constexpr bool is_container(Value::Kind kind) {
  return is_sequence(kind) || kind == Value::Kind::dict || kind == Value::Kind::object;
}

// Can hold others now: a tensor without attributes cannot.
[[nodiscard]] inline bool holds_others(const Value& value) {
  return is_container(value.kind()) ||
         (value.is(Value::Kind::tensor) && value.as_tensor().attributes);
}

// The dict whose key is step number `step` of the way to a leaf; null: a plain one, or a list.
[[nodiscard]] inline const Container* container_at(const Leaf& leaf, std::size_t step) {
  const bool there = leaf.containers && step < leaf.containers->size();
  return there ? (*leaf.containers)[step].get() : nullptr;
}

// The entry of a dict; null when there is none, and when `value` is no dict.
[[nodiscard]] inline const Value* find_entry(const Value& value, std::string_view key) {
  return value.is(Value::Kind::dict) ? value.find(key) : nullptr;
}

// The same for an entry of this kind alone.
[[nodiscard]] inline const Value* find_entry_of_kind(const Value& value, std::string_view key,
                                                     Value::Kind kind) {
  const Value* found = find_entry(value, key);
  return found != nullptr && found->is(kind) ? found : nullptr;
}

// The key of a dict that the step is; none: an index of a list.
[[nodiscard]] inline std::optional<Value> key_of_step(const PathPart& step) {
  if (std::holds_alternative<std::int64_t>(step)) return std::nullopt;
  const auto* odd = std::get_if<DictKey>(&step);
  return odd != nullptr ? odd->key : Value(std::get<std::string>(step));
}

// The step that a key of a dict is.
[[nodiscard]] inline PathPart step_of_key(const Value& key) {
  if (key.is(Value::Kind::string)) return key.as_string();
  return DictKey{key_text(key), key};
}

// What follows calls visit(child, name) for children; name() is the step that leads to one, made
// when asked for.
[[nodiscard]] inline auto step_named(const char* name) {
  return [name] { return std::string(name); };
}

// A child that may be null or none.
template <typename Child, typename Visit>
void visit_if_there(const Child& child, const char* name, Visit& visit) {
  if (child) visit(*child, step_named(name));
}

template <typename Visit>
void visit_items(const std::vector<Value>& items, const char* prefix, Visit& visit) {
  for (std::size_t i = 0; i < items.size(); ++i)
    visit(items[i], [prefix, i] { return prefix + std::to_string(i); });
}

template <typename Visit>
void visit_pairs(const std::vector<Value::Pair>& pairs, Visit& visit) {
  for (const auto& [key, child] : pairs) {
    visit(key, step_named("key"));
    visit(child, [&key = key] { return key_text(key); });
  }
}

template <typename Visit>
void visit_object(const Object& object, Visit& visit) {
  visit(object.callable, step_named("callable"));
  visit(object.arguments, step_named("arguments"));
  visit_if_there(object.keywords, "keywords", visit);
  visit_if_there(object.state, "state", visit);
  visit_items(object.list_items, "item", visit);
  visit_pairs(object.dict_items, visit);
}

// All children of a value.
template <typename Visit>
void for_each_child(const Value& value, Visit visit) {
  using Kind = Value::Kind;
  if (is_sequence(value.kind())) {
    visit_items(value.items(), "", visit);
  } else if (value.is(Kind::dict)) {
    visit_pairs(value.pairs(), visit);
    visit_if_there(value.container_state(), "state", visit);
    visit_if_there(value.default_factory(), "default_factory", visit);
  } else if (value.is(Kind::tensor)) {
    visit_if_there(value.as_tensor().attributes, "attributes", visit);
  } else if (value.is(Kind::object)) {
    visit_object(value.as_object(), visit);
  }
}

// Proof that a value can be walked: a caller may have built anything.

// Containers and objects inside one another. Readers take 1000; a walk that calls itself for each
// level stays within a thread's stack.
inline constexpr std::size_t kMaxLevels = 2000;

// Throws `invalid_argument` for a value that contains itself and `limit` for one of more than
// kMaxLevels levels, naming a place. The work is bounded by the nodes, not by the paths to them.
void require_walkable(const Value& value);

// Trees of their own.

// Gives what stands for a node in a copy; none: the node's own copy.
using Replacement = std::function<std::optional<Value>(const Value& node)>;

// A copy of a walkable tree whose containers, objects, tensors and descriptions of
// storages are its own, so that changing one tree leaves the other as it is; the bytes of storages
// are shared. What one tree shares between places its copy shares, too. `replacement`, if there is
// one, is asked once for each node that is not a number, a string or the like.
[[nodiscard]] Value copy_tree(const Value& tree, const Replacement& replacement = {});

}  // namespace tessera
