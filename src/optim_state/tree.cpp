#include "optim_state/tree.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "base/text.h"
#include "checkpoint/open/tree.h"
#include "fsdp/state/sharded_load.h"
#include "optim_state/state_message.h"
#include "tessera/error.h"
#include "torch/tensor.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

// `copy` makes a contiguous tensor of its own of one.
Value copy_of_tensor(const Tensor& tensor,
                     const std::function<at::Tensor(const at::Tensor&)>& copy) {
  auto made = tensor;
  for (auto& piece : made.pieces) {
    if (piece.storage) piece = piece_in(piece, copy(tensor_of_piece(tensor, piece)));
  }
  return made;
}

}  // namespace

Value map_children(const Value& tree, const std::function<Value(const Value&)>& make) {
  if (tree.is(Value::Kind::dict)) {
    std::vector<Value::Pair> pairs;
    for (const auto& [key, value] : tree.pairs()) pairs.emplace_back(key, make(value));
    return Value::dict(std::move(pairs), tree.dict_kind());
  }
  if (!is_one_of(tree.kind(), Value::Kind::list, Value::Kind::tuple)) return tree;
  Value::List made;
  for (const auto& item : tree.items()) made.push_back(make(item));
  return tree.is(Value::Kind::list) ? Value::list(std::move(made)) : Value::tuple(std::move(made));
}

Value map_tensors(const Value& tree, const std::function<Value(const Tensor&)>& make) {
  if (tree.is(Value::Kind::tensor)) return make(tree.as_tensor());
  return map_children(tree, [&](const Value& child) { return map_tensors(child, make); });
}

Value deep_copy(const Value& tree) {
  return map_tensors(tree, [](const Tensor& leaf) {
    return copy_of_tensor(
        leaf, [](const at::Tensor& piece) { return piece.clone(at::MemoryFormat::Contiguous); });
  });
}

Value host_copy(const Value& tree) {
  return map_tensors(tree, [](const Tensor& leaf) {
    return copy_of_tensor(leaf, [](const at::Tensor& piece) {
      return piece.to(at::kCPU, piece.scalar_type(), /*non_blocking=*/false, /*copy=*/true,
                      at::MemoryFormat::Contiguous);
    });
  });
}

Checkpoint checkpoint_of(const Value& tree) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = "memory";
  checkpoint.root = tree;
  checkpoint.leaves = leaves_of(tree);
  return checkpoint;
}

Value with_params(const Value& groups,
                  const std::function<Value::List(const Value::List&)>& params_of) {
  Value::List made;
  for (const auto& group : groups.items()) {
    auto params = params_of(group.at("params").items());
    auto copy = deep_copy(group);
    copy.set_item("params", Value::list(std::move(params)));
    made.push_back(std::move(copy));
  }
  return Value::list(std::move(made));
}

KeyOrder order_of(const Value& key) {
  if (key.is(Value::Kind::integer)) return key.as_int();
  return key.as_string();
}

Value stored_part(const Checkpoint& checkpoint, const Path& path) {
  std::vector<Leaf> below;
  for (const auto i : leaves_below(checkpoint, path)) {
    auto part = part_of(checkpoint.leaves[i], path.size());
    part.name = dotted(part.path);
    part.containers = nullptr;
    below.push_back(std::move(part));
  }
  return unflatten(below);
}

namespace {

constexpr std::string_view kState = "state.", kGroups = "param_groups.";

void require_flat(const Value& value, const std::string& key) {
  const bool is_possible = is_one_of(value.kind(), Value::Kind::tensor, Value::Kind::boolean,
                                     Value::Kind::integer, Value::Kind::real);
  if (is_possible) return;
  throw Error(
      ErrorCode::unsupported,
      "only states that are tensors, numbers or dicts have flat keys; this one is " + render(value))
      .at_key(key);
}

void add_flat(const Value& state, const std::string& prefix, std::vector<Value::Pair>& into) {
  for (const auto& [key, value] : state.pairs()) {
    const auto name = prefix + "." + key_text(key);
    if (value.is(Value::Kind::dict)) {
      add_flat(value, name, into);
      continue;
    }
    require_flat(value, name);
    into.emplace_back(name, value);
  }
}

// Along the parts of `entry` between its dots.
void insert(Value& into, std::string_view entry, const Value& value) {
  const auto dot = entry.find('.');
  if (dot == std::string_view::npos) return into.set_item(std::string(entry), value);
  const auto first = entry.substr(0, dot);
  if (into.find(first) == nullptr) into.set_item(std::string(first), Value::dict());
  auto& inner = into.at(first);
  if (!inner.is(Value::Kind::dict))
    throw Error(ErrorCode::mismatch, "a value and values below it").at_key(std::string(entry));
  insert(inner, entry.substr(dot + 1), value);
}

struct OfParameter {
  std::string name;  // its first one; empty: no parameter is meant
  std::string_view entry;
};

// The longest is meant if it begins with several names of parameters.
OfParameter split(const OptimModel& model, std::string_view key) {
  for (auto dot = key.rfind('.'); dot != std::string_view::npos && dot > 0;
       dot = key.rfind('.', dot - 1)) {
    const auto name = model.first_name(std::string(key.substr(0, dot)));
    if (!name.empty()) return {name, key.substr(dot + 1)};
  }
  return {};
}

void require_same_options(const std::string& name, const Value& options,
                          const std::string& first_name, const Value& first) {
  if (same_value(options, first)) return;
  throw Error(ErrorCode::mismatch,
              "All the parameters in the same parameter group should have the same saved "
              "param_group value, but those of " +
                  name + " are " + render(options) + " and those of " + first_name + " " +
                  render(first))
      .at_key(std::string(kGroups) + name);
}

}  // namespace

bool has_flat_keys(const Value& state) {
  return state.find("state") == nullptr && state.find("param_groups") == nullptr;
}

Value with_flat_keys(const Value& state) {
  std::vector<Value::Pair> flat;
  for (const auto& [key, entries] : state.at("state").pairs())
    add_flat(entries, std::string(kState) + key_text(key), flat);
  for (const auto& group : state.at("param_groups").items()) {
    for (const auto& name : group.at("params").items()) {
      for (const auto& [key, value] : group.pairs()) {
        if (!(key == Value("params")))
          flat.emplace_back(std::string(kGroups) + key_text(name) + "." + key_text(key), value);
      }
    }
  }
  return Value::dict(std::move(flat));
}

FlatKeys::FlatKeys(const OptimModel& model, const Value& state) : model_(model) {
  for (const auto& [key, value] : state.pairs()) {
    if (key.is(Value::Kind::string)) add(key.as_string(), value);
  }
}

void FlatKeys::add(const std::string& key, const Value& value) {
  for (const auto& [prefix, into] : {std::pair{kState, &states_}, std::pair{kGroups, &options_}}) {
    if (!key.starts_with(prefix)) continue;
    const auto [name, entry] = split(model_, std::string_view(key).substr(prefix.size()));
    if (name.empty()) continue;
    insert(into->try_emplace(name, Value::dict()).first->second, entry, value);
  }
}

Value FlatKeys::options_for(const std::vector<std::string>& names) const {
  const std::string* first = nullptr;
  for (const auto& name : names) {
    if (!options_.contains(name)) continue;
    if (first != nullptr)
      require_same_options(name, options_.at(name), *first, options_.at(*first));
    if (first == nullptr) first = &name;
  }
  if (first != nullptr) return Value::dict(options_.at(*first).pairs());
  if (names.empty()) return Value::dict();  // nobody's options have no key
  throw Error(ErrorCode::mismatch, "the state has no options for " + joined(names))
      .at_key(std::string(kGroups) + names.front());
}

Value FlatKeys::tree_for(const OptimizerRef& optim) const {
  std::vector<Value::Pair> states;
  Value::List groups;
  for (const auto& group : params_by_group(model_, optim)) {
    const auto names = names_of(group);
    auto options = options_for(names);
    options.set_item("params", Value::list(Value::List(names.begin(), names.end())));
    groups.push_back(std::move(options));
    for (const auto& name : names) {
      if (const auto state = states_.find(name); state != states_.end())
        states.emplace_back(name, state->second);
    }
  }
  return Value::dict({{"state", Value::dict(std::move(states))},
                      {"param_groups", Value::list(std::move(groups))}});
}

}  // namespace tessera::detail
