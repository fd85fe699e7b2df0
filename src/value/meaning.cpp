#include "value/meaning.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "tessera/numpy_array.h"
#include "value/children.h"
#include "value/known.h"

namespace tessera {
namespace {

struct Form {
  std::string type;
  Value::List parts;
};

// nullopt: `node` is no known value. What recursion needs of the stack stays small without this.
[[gnu::noinline]] std::optional<Form> form_of(const Value& node) {
  if (auto array = numpy_array(node)) {
    const std::string type = "numpy." + numpy_class(*array);
    // A scalar by its text: sets may have many, and all tensors of a dtype have one hash.
    if (array->is_scalar) return Form{type, {numpy_text(*array, 0)}};
    return Form{type, {Value(std::move(array->tensor))}};
  }
  const auto known = known_value(node);
  if (!known) return std::nullopt;
  Form form{std::string(known->type), {}};
  for (const auto& part : known->parts) {
    const auto* text = std::get_if<std::string>(&part);
    form.parts.push_back(text != nullptr ? Value(*text) : std::get<Value>(part));
  }
  return form;
}

// With the parts as items, so that a value has at most two levels for one of the given value's.
[[gnu::noinline]] Value object_of(Form form) {
  return Value::object({.callable = Value::global("", std::move(form.type)),
                        .arguments = Value::tuple({}),
                        .list_items = std::move(form.parts)});
}

// What a pickle may unfold to is bounded where it is read, and so is this.
class Meanings {
 public:
  Value of(const Value& value) {
    return copy_tree(value, [this](const Value& node) { return replacement(node); });
  }

 private:
  std::optional<Value> replacement(const Value& node) {
    if (node.is(Value::Kind::tensor)) return node;
    if (!node.is(Value::Kind::object)) return std::nullopt;
    if (const auto found = made_.find(node.identity()); found != made_.end()) return found->second;
    std::optional<Form> form = form_of(node);
    if (!form) return std::nullopt;
    for (Value& part : form->parts) part = of(part);
    return made_.emplace(node.identity(), object_of(*std::move(form))).first->second;
  }

  std::unordered_map<const void*, Value> made_;  // by node of the tree that was given
};

}  // namespace

Value meaning_of(const Value& value) {
  return Meanings().of(value);
}

}  // namespace tessera
