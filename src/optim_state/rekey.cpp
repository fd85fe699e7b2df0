// Keys of optimizer state: numbers and names, and whole trees out of sharded ones.
#include <torch/torch.h>

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

#include "optim/state_key.h"
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
    const bool is_known = key.is(Value::Kind::string) || key.is(Value::Kind::integer);
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
  Value::List made;
  for (const auto& group : groups->items()) {
    Value::List params;
    for (const auto& key : group.at("params").items()) params.push_back(mapped(map, key));
    std::ranges::sort(params, [](const Value& a, const Value& b) {
      return a.is(Value::Kind::integer) ? a.as_int() < b.as_int() : a.as_string() < b.as_string();
    });
    auto copy = detail::deep_copy(group);
    copy.set_item("params", Value::list(std::move(params)));
    made.push_back(std::move(copy));
  }
  result.set_item("param_groups", Value::list(std::move(made)));
  return result;
}

// The sharded tensors of a tree by where they are.
void find_sharded(const Value& tree, const std::string& path,
                  std::map<std::string, const Tensor*>& found) {
  if (tree.is(Value::Kind::tensor) && tree.as_tensor().sharded) found[path] = &tree.as_tensor();
  if (!tree.is(Value::Kind::dict)) return;
  for (const auto& [key, value] : tree.pairs())
    find_sharded(value, path + "." + state_key(key), found);
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
    if (param->names.size() != 1) {
      throw Error(ErrorCode::invalid_argument,
                  "Each parameter should only map to one parameter name but got several")
          .at_key(param->own_name);
    }
    const Value name(param->names.front());
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
  for (const auto& [key, value] : own.pairs()) {
    const auto* given = state.at("state").find(key.as_string());
    if (given == nullptr) {
      throw Error(ErrorCode::mismatch,
                  "the state lacks a parameter that the optimizer has a state of")
          .at_key(key.as_string());
    }
    if (given->size() != value.size()) {
      throw Error(ErrorCode::mismatch, "the state has " + std::to_string(given->size()) +
                                           " entries, the optimizer " +
                                           std::to_string(value.size()))
          .at_key(key.as_string());
    }
  }
  load_optimizer_state_dict(ref_, state);
}

Value gather_state_dict(const Value& tree, const Mesh& mesh) {
  const torch::NoGradGuard no_grad;
  const auto trees =
      detail::all_trees(mesh.group(), "gathering a sharded tree", [&] { return tree; });
  std::vector<std::map<std::string, const Tensor*>> found(trees.size());
  for (std::size_t rank = 0; rank < trees.size(); ++rank)
    find_sharded(trees[rank], "", found[rank]);
  std::map<std::string, const Tensor*> mine;
  find_sharded(tree, "", mine);
  for (const auto& other : found) {
    const bool is_same = std::ranges::equal(
        other, found.front(), {}, [](auto& e) { return e.first; }, [](auto& e) { return e.first; });
    if (!is_same)
      throw Error(ErrorCode::mismatch, "the ranks' trees have sharded tensors in different places");
  }
  std::map<std::string, Value> whole;
  for (const auto& [path, tensor] : mine) {
    Scattered scattered;
    for (const auto& other : found) scattered.push_back(other.at(path));
    whole.emplace(path, gathered(mesh, scattered, *tensor));
  }
  return with_whole(tree, "", whole);
}

}  // namespace tessera
