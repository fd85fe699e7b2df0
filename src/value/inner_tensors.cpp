#include "value/inner_tensors.h"

#include <algorithm>
#include <unordered_set>
#include <utility>

#include "value/children.h"

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
  return Walk().finish(value);
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

}  // namespace tessera
