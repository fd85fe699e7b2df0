#include "value/inner_tensors.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

class Walk {
 public:
  std::vector<InnerTensor> finish(const Value& root) {
    steps_.push_back({&root, 0, ""});
    seen_.insert(root.identity());
    // Children are appended behind: no depth of nesting reaches the stack.
    for (std::size_t at = 0; at < steps_.size(); ++at) {
      const Value& value = *steps_[at].value;
      if (at > 0 && value.is(Kind::tensor)) found_.push_back({path_to(at), &value});
      visit(value, at);
    }
    return std::move(found_);
  }

 private:
  struct Step {
    const Value* value;
    std::size_t parent;  // index into steps_; the root is its own
    std::string name;
  };

  [[nodiscard]] std::string path_to(std::size_t at) const {
    std::vector<const std::string*> names;
    for (; at != 0; at = steps_[at].parent) names.push_back(&steps_[at].name);
    std::string path;
    for (auto name = names.rbegin(); name != names.rend(); ++name) path += "." + **name;
    return path;
  }

  void add(const Value& child, std::size_t parent, std::string name) {
    const bool can_hold = child.is(Kind::tensor) || child.is(Kind::object) ||
                          child.is(Kind::dict) || is_sequence(child);
    if (can_hold && seen_.insert(child.identity()).second)
      steps_.push_back({&child, parent, std::move(name)});
  }

  void add_all(const std::vector<Value>& children, std::size_t parent, const std::string& prefix) {
    std::size_t index = 0;
    for (const Value& child : children) add(child, parent, prefix + std::to_string(index++));
  }

  void add_pairs(const std::vector<Value::Pair>& pairs, std::size_t parent) {
    for (const auto& [key, value] : pairs) {
      add(key, parent, "key");
      add(value, parent, key_text(key));
    }
  }

  static bool is_sequence(const Value& value) {
    return value.is(Kind::list) || value.is(Kind::tuple) || value.is(Kind::set) ||
           value.is(Kind::frozenset);
  }

  void visit(const Value& value, std::size_t at) {
    if (is_sequence(value)) {
      add_all(value.items(), at, "");
    } else if (value.is(Kind::dict)) {
      add_pairs(value.pairs(), at);
      if (const Value* state = value.container_state()) add(*state, at, "state");
      if (const Value* factory = value.default_factory()) add(*factory, at, "default_factory");
    } else if (value.is(Kind::tensor)) {
      if (const auto& attributes = value.as_tensor().attributes) add(*attributes, at, "attributes");
    } else if (value.is(Kind::object)) {
      const Object& object = value.as_object();
      add(object.callable, at, "callable");
      add(object.arguments, at, "arguments");
      if (object.keywords) add(*object.keywords, at, "keywords");
      if (object.state) add(*object.state, at, "state");
      add_all(object.list_items, at, "item");
      add_pairs(object.dict_items, at);
    }
  }

  std::vector<Step> steps_;
  std::unordered_set<const void*> seen_;
  std::vector<InnerTensor> found_;
};

}  // namespace

std::vector<InnerTensor> inner_tensors(const Value& value) {
  return Walk().finish(value);
}

std::vector<Value> all_tensors(const std::vector<Leaf>& leaves) {
  std::vector<Value> tensors;
  std::unordered_set<const void*> known;
  const auto add = [&](const Value& tensor) {
    if (known.insert(tensor.identity()).second) tensors.push_back(tensor);
  };
  for (const Leaf& leaf : leaves) {
    const bool tensor = leaf.value.is(Value::Kind::tensor);
    if (tensor) add(leaf.value);
    if (tensor && !leaf.value.as_tensor().attributes) continue;
    for (const InnerTensor& inner : inner_tensors(leaf.value)) add(*inner.tensor);
  }
  return tensors;
}

}  // namespace tessera
