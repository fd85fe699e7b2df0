#include "value/inner_tensors.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "value/children.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

class InnerWalk {
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

  void visit(const Value& value, std::size_t at) {
    for_each_child(value, [this, at](const Value& child, const auto& name) {
      const bool can_hold = child.is(Kind::tensor) || is_container(child.kind());
      if (can_hold && seen_.insert(child.identity()).second) steps_.push_back({&child, at, name()});
    });
  }

  std::vector<Step> steps_;
  std::unordered_set<const void*> seen_;
  std::vector<InnerTensor> found_;
};

}  // namespace

std::vector<InnerTensor> inner_tensors(const Value& value) {
  return InnerWalk().finish(value);
}

std::vector<NamedTensor> all_tensors(const std::vector<Leaf>& leaves) {
  std::vector<NamedTensor> tensors;
  std::unordered_set<const void*> known;
  const auto add = [&](const Value& tensor, const Leaf& leaf, const std::string& path) {
    if (known.insert(tensor.identity()).second) tensors.push_back({leaf.name + path, tensor});
  };
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Kind::tensor)) add(leaf.value, leaf, "");
    if (!holds_others(leaf.value)) continue;
    for (const InnerTensor& inner : inner_tensors(leaf.value)) add(*inner.tensor, leaf, inner.path);
  }
  return tensors;
}

namespace {

using Kind = Value::Kind;

std::optional<Shape> shape_of(const Value::List& items) {
  Shape shape;
  shape.reserve(items.size());
  for (const Value& item : items) {
    if (!item.is(Kind::integer) || !item.as_integer().big.empty()) return std::nullopt;
    shape.push_back(item.as_integer().small);
  }
  return shape;
}

std::optional<Shape> shape_of(const Object& object) {
  if (object.name() != "torch.Size" || !object.arguments.is(Kind::tuple)) return std::nullopt;
  const Value::List& given = object.arguments.items();
  if (given.empty()) return Shape();
  if (given.size() != 1 || given[0].is(Kind::object)) return std::nullopt;
  return size_from(given[0]);
}

}  // namespace

std::optional<Shape> size_from(const Value& value) {
  if (value.is(Kind::tuple) || value.is(Kind::list)) return shape_of(value.items());
  return value.is(Kind::object) ? shape_of(value.as_object()) : std::nullopt;
}

Value size_object(const Shape& shape) {
  Value::List items(shape.begin(), shape.end());
  return Value::object({.callable = Value::global("torch", "Size"),
                        .arguments = Value::tuple({Value::tuple(std::move(items))})});
}

}  // namespace tessera
