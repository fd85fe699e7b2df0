#include "checkpoint/write/flat_leaves.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_set>

#include "tessera/error.h"
#include "value/inner_tensors.h"
#include "value/render.h"

namespace tessera {
namespace {

using Names = std::unordered_set<std::string>;

// A tensor's attributes and whatever else is no tensor.
bool may_hold_tensors(const Value& value) {
  return !value.is(Value::Kind::tensor) || value.as_tensor().attributes;
}

// `base`, numbered where it is taken; from now on it is.
std::string take_name(std::string base, Names& names) {
  if (base.starts_with('.')) base.erase(0, 1);  // of a root that is no container
  std::string name = base;
  for (int n = 1; !names.insert(name).second; ++n) name = base + "~" + std::to_string(n);
  return name;
}

}  // namespace

void require_flat_names(const std::vector<Leaf>& leaves) {
  Names names;
  names.reserve(leaves.size());
  for (const Leaf& leaf : leaves) {
    std::string name = leaf.path.empty() ? leaf.name : dotted(leaf.path);
    if (names.insert(name).second) continue;
    throw Error(ErrorCode::conflict,
                "two leaves of the tree would have this name; torch files alone can hold both")
        .at_key(printable(name));
  }
}

void add_inner_tensors(std::vector<Leaf>& leaves) {
  std::unordered_set<const void*> known;  // tensors that have a name
  Names names;
  for (const Leaf& leaf : leaves) {
    if (leaf.value.is(Value::Kind::tensor)) known.insert(leaf.value.identity());
    names.insert(leaf.name);
  }
  const std::size_t count = leaves.size();
  for (std::size_t i = 0; i < count; ++i) {
    if (!may_hold_tensors(leaves[i].value)) continue;
    for (const InnerTensor& inner : inner_tensors(leaves[i].value)) {
      if (!known.insert(inner.tensor->identity()).second) continue;
      std::string name = take_name(leaves[i].name + inner.path, names);
      Value found = *inner.tensor;
      leaves.push_back({std::move(name), {}, std::move(found)});
    }
  }
}

namespace {

constexpr std::string_view kGroups = "param_groups";
constexpr std::string_view kState = "state";
constexpr std::string_view kParams = "params";

// What stands beside one another in an optimizer's dict.
struct Optimizer {
  Path path;                       // of the dict
  std::set<std::string> numbers;   // of its parameters, written out
  bool is_numbered = true;         // all of them are
  bool has_others = false;         // a key of its state is none of them
  std::vector<std::size_t> state;  // leaves below it

  [[nodiscard]] bool changes() const { return is_numbered && !has_others && !state.empty(); }
};
using Optimizers = std::map<std::string, Optimizer>;

bool is_text(const PathPart& part, std::string_view text) {
  const auto* own = std::get_if<std::string>(&part);
  return own != nullptr && *own == text;
}

// Calls `use` with each place in the path where `step` stands, counted from the front.
template <typename Use>
void for_each_step(const Path& path, std::string_view step, Use use) {
  for (std::size_t i = 0; i < path.size(); ++i) {
    if (is_text(path[i], step)) use(i);
  }
}

// The key of the first `depth` steps; no two paths have the same.
std::string key_of(const Path& path, std::size_t depth) {
  std::string key;
  for (std::size_t i = 0; i < depth; ++i) {
    const std::string text = step_text(path[i]);
    key += std::to_string(path[i].index()) + ' ' + std::to_string(text.size()) + ' ' + text;
  }
  return key;
}

void add_params(const Value& params, Optimizer& optimizer) {
  if (!params.is(Value::Kind::list)) return;
  for (const Value& number : params.items()) {
    const bool is_number = number.is(Value::Kind::integer) && number.as_integer().big.empty();
    optimizer.is_numbered = optimizer.is_numbered && is_number;
    if (is_number) optimizer.numbers.insert(std::to_string(number.as_integer().small));
  }
}

void add_group(const Value& group, Optimizer& optimizer) {
  if (!group.is(Value::Kind::dict)) return;
  for (const auto& [key, value] : group.pairs()) {
    if (key == Value(std::string(kParams))) add_params(value, optimizer);
  }
}

// `param_groups` is one leaf, or one for each entry of each group where a tensor is among them.
void add_groups(const Leaf& leaf, std::size_t depth, Optimizer& optimizer) {
  if (leaf.path.size() == depth + 1 && leaf.value.is(Value::Kind::list)) {
    for (const Value& group : leaf.value.items()) add_group(group, optimizer);
  }
  if (leaf.path.size() == depth + 3 && is_text(leaf.path.back(), kParams))
    add_params(leaf.value, optimizer);
}

void add_state(const Path& path, std::size_t depth, std::size_t leaf, Optimizer& optimizer) {
  const auto* key = std::get_if<std::string>(&path[depth + 1]);
  const bool is_number = key != nullptr && optimizer.numbers.contains(*key);
  optimizer.has_others = optimizer.has_others || !is_number;
  optimizer.state.push_back(leaf);
}

Optimizers optimizers_of(const std::vector<Leaf>& leaves) {
  Optimizers found;
  for (const Leaf& leaf : leaves) {
    for_each_step(leaf.path, kGroups, [&](std::size_t at) {
      Optimizer& optimizer = found[key_of(leaf.path, at)];
      optimizer.path.assign(leaf.path.begin(), leaf.path.begin() + static_cast<std::ptrdiff_t>(at));
      add_groups(leaf, at, optimizer);
    });
  }
  if (found.empty()) return found;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const Path& path = leaves[i].path;
    for_each_step(path, kState, [&](std::size_t at) {
      const auto optimizer = found.find(key_of(path, at));
      if (optimizer != found.end() && at + 1 < path.size())
        add_state(path, at, i, optimizer->second);
    });
  }
  std::erase_if(found, [](const auto& one) { return !one.second.changes(); });
  return found;
}

}  // namespace

std::vector<std::string> number_state(std::vector<Leaf>& leaves) {
  std::vector<std::string> numbered;
  for (const auto& [key, optimizer] : optimizers_of(leaves)) {
    for (const std::size_t i : optimizer.state) {
      PathPart& step = leaves[i].path[optimizer.path.size() + 1];
      const std::string text = std::get<std::string>(step);
      step = DictKey{text, Value(static_cast<std::int64_t>(std::stoll(text)))};
    }
    Path state = optimizer.path;
    state.emplace_back(std::string(kState));
    numbered.push_back(dotted(state));
  }
  return numbered;
}

bool has_numbered_state(const std::vector<Leaf>& leaves) {
  return !optimizers_of(leaves).empty();
}

}  // namespace tessera
