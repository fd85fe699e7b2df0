// Keys of optimizer state: numbers and names, and whole trees out of sharded ones.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <ranges>
#include <unordered_map>
#include <utility>

#include "base/text.h"
#include "optim/optimizer_state.h"
#include "optim_state/chunks.h"
#include "optim_state/optim_model.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "torch/tensor.h"
#include "value/render.h"

namespace tessera {
namespace {

using detail::ChunkArray;
using detail::OptimModel;
using detail::Scattered;
using detail::state_key;

// The one kind that all keys have; none: there are no keys.
std::optional<Value::Kind> kind_of_keys(const Value& states) {
  std::optional<Value::Kind> kind;
  for (const auto& [key, value] : states.pairs()) {
    const bool is_known = is_one_of(key.kind(), Value::Kind::string, Value::Kind::integer);
    if (is_known && key.kind() == kind.value_or(key.kind())) {
      kind = key.kind();
      continue;
    }
    throw Error(ErrorCode::invalid_argument,
                "Invalid parameter keys: all are to be names or all numbers, found " + render(key));
  }
  return kind;
}

const Value& mapped(const std::unordered_map<std::string, Value>& map, const Value& key) {
  const auto found = map.find(state_key(key));
  if (found != map.end()) return found->second;
  throw Error(ErrorCode::mismatch,
              "the optimizer has no parameter for the state's key " + state_key(key));
}

Value rekeyed(const Value& tree, const std::unordered_map<std::string, Value>& map) {
  std::vector<Value::Pair> states;
  for (const auto& [key, value] : tree.at("state").pairs())
    states.emplace_back(mapped(map, key), value);
  auto result = Value::dict({{"state", Value::dict(std::move(states))}});
  const auto* groups = tree.find("param_groups");
  if (groups == nullptr) return result;
  const auto sorted_keys = [&map](const Value::List& listed) {
    Value::List params;
    for (const auto& key : listed) params.push_back(mapped(map, key));
    std::ranges::sort(params, {}, detail::order_of);
    return params;
  };
  result.set_item("param_groups", detail::with_params(*groups, sorted_keys));
  return result;
}

// The sharded tensors of a tree by where they are.
using ShardedTensors = std::map<std::string, const Tensor*>;

void find_sharded(const Value& tree, const std::string& path, ShardedTensors& found) {
  if (tree.is(Value::Kind::tensor) && tree.as_tensor().sharded) found[path] = &tree.as_tensor();
  if (!tree.is(Value::Kind::dict)) return;
  for (const auto& [key, value] : tree.pairs())
    find_sharded(value, path + "." + state_key(key), found);
}

ShardedTensors sharded_of(const Value& tree) {
  ShardedTensors found;
  find_sharded(tree, "", found);
  return found;
}

void require_same_places(const std::vector<ShardedTensors>& of_ranks) {
  const auto places = std::views::keys(of_ranks.front());
  const bool is_same = std::ranges::all_of(of_ranks, [&](const ShardedTensors& other) {
    return std::ranges::equal(std::views::keys(other), places);
  });
  if (!is_same)
    throw Error(ErrorCode::mismatch, "the ranks' trees have sharded tensors in different places");
}

Value with_whole(const Value& tree, const std::string& path,
                 const std::map<std::string, Value>& whole) {
  if (const auto found = whole.find(path); found != whole.end()) return found->second;
  if (!tree.is(Value::Kind::dict)) return tree;
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : tree.pairs())
    pairs.emplace_back(key, with_whole(value, path + "." + state_key(key), whole));
  return Value::dict(std::move(pairs), tree.dict_kind());
}

Value gathered(const Mesh& mesh, const Scattered& scattered, const Tensor& mine) {
  const ChunkArray chunks({scattered});
  const auto all = detail::exchange_over(mesh, chunks.give(mesh.rank(), {&mine}));
  auto made = at::empty(mine.shape, all.options());
  detail::redistribute(mine.shape, all, chunks.parts(0), made.view({-1}), {whole(mine.shape), 0});
  return leaf_of(made);
}

const std::string& require_one_name(const detail::ModelParam& param) {
  if (param.names.size() == 1) return param.names.front();
  throw Error(ErrorCode::invalid_argument,
              "Each parameter should only map to one parameter name but got several")
      .at_key(param.own_name);
}

void require_entries(const Value& state, const std::string& name, std::size_t count) {
  const auto* given = state.find(name);
  if (given == nullptr) {
    throw Error(ErrorCode::mismatch,
                "the state lacks a parameter that the optimizer has a state of")
        .at_key(name);
  }
  if (given->size() != count) {
    throw Error(ErrorCode::mismatch, "the state has " + std::to_string(given->size()) +
                                         " entries, the optimizer " + std::to_string(count))
        .at_key(name);
  }
}

}  // namespace

Value rekey_optim_state_dict(const Value& state, OptimStateKeyType key_type, ModuleRef model_ref,
                             const OptimTarget& target) {
  const auto kind = kind_of_keys(state.at("state"));
  const auto wanted =
      key_type == OptimStateKeyType::PARAM_NAME ? Value::Kind::string : Value::Kind::integer;
  if (kind && *kind == wanted) return state;
  const OptimModel model(model_ref.get());
  std::unordered_map<std::string, Value> map;
  for (const auto& [key, param] : detail::keys_of(model, target.optim, target.optim_input)) {
    const Value name(require_one_name(*param));
    if (wanted == Value::Kind::string) {
      map.emplace(state_key(key), name);
    } else {
      map.emplace(state_key(name), key);
    }
  }
  return rekeyed(state, map);
}

NamedOptimizer::NamedOptimizer(ModuleRef model, const OptimizerRef& optimizer)
    : ref_(optimizer.with_names(OptimModel(model.get()).own_names())) {}

void NamedOptimizer::load_state_dict(const Value& state) {
  const auto own = state_dict().at("state");
  for (const auto& [key, value] : own.pairs())
    require_entries(state.at("state"), key.as_string(), value.size());
  load_optimizer_state_dict(ref_, state);
}

Value gather_state_dict(const Value& tree, const Mesh& mesh) {
  const torch::NoGradGuard no_grad;
  const auto trees =
      detail::all_trees(mesh.group(), "gathering a sharded tree", [&] { return tree; });
  std::vector<ShardedTensors> found;
  for (const auto& other : trees) found.push_back(sharded_of(other));
  require_same_places(found);
  std::map<std::string, Value> whole;
  for (const auto& [path, tensor] : sharded_of(tree)) {
    Scattered scattered;
    for (const auto& other : found) scattered.push_back(other.at(path));
    whole.emplace(path, gathered(mesh, scattered, *tensor));
  }
  return with_whole(tree, "", whole);
}

}  // namespace tessera
