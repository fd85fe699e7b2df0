// What values hold: the kinds that hold others, and the way to each child.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

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

// Calls visit(child, name) for every child of `value`; name() is the step that leads to it, made
// when asked for.
template <typename Visit>
void for_each_child(const Value& value, Visit visit) {
  using Kind = Value::Kind;
  const auto named = [](const char* name) { return [name] { return std::string(name); }; };
  const auto visit_all = [&visit](const std::vector<Value>& children, const char* prefix) {
    for (std::size_t i = 0; i < children.size(); ++i)
      visit(children[i], [prefix, i] { return prefix + std::to_string(i); });
  };
  const auto visit_pairs = [&visit, &named](const std::vector<Value::Pair>& pairs) {
    for (const auto& [key, child] : pairs) {
      visit(key, named("key"));
      visit(child, [&key = key] { return key_text(key); });
    }
  };
  if (is_sequence(value.kind())) {
    visit_all(value.items(), "");
  } else if (value.is(Kind::dict)) {
    visit_pairs(value.pairs());
    if (const Value* state = value.container_state()) visit(*state, named("state"));
    if (const Value* factory = value.default_factory()) visit(*factory, named("default_factory"));
  } else if (value.is(Kind::tensor)) {
    if (const auto& attributes = value.as_tensor().attributes)
      visit(*attributes, named("attributes"));
  } else if (value.is(Kind::object)) {
    const Object& object = value.as_object();
    visit(object.callable, named("callable"));
    visit(object.arguments, named("arguments"));
    if (object.keywords) visit(*object.keywords, named("keywords"));
    if (object.state) visit(*object.state, named("state"));
    visit_all(object.list_items, "item");
    visit_pairs(object.dict_items);
  }
}

}  // namespace tessera
