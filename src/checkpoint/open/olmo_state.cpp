#include "checkpoint/open/olmo_state.h"

#include <algorithm>
#include <map>

#include "format/sharded/sharded.h"
#include "tessera/error.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

const Value* find_dict(const Value& tree, std::string_view key) {
  const Value* found = tree.find(key);
  return found != nullptr && found->is(Kind::dict) ? found : nullptr;
}

bool is_text(const Value& value, std::string_view text) {
  return value.is(Kind::string) && value.as_string() == text;
}

Value copy_of(const Value& dict, std::vector<Value::Pair> pairs, DictKind kind) {
  Value copy = Value::dict(std::move(pairs), kind);
  if (const Value* state = dict.container_state();
      state != nullptr && kind == DictKind::ordered_dict)
    copy.set_container_state(*state);
  return copy;
}

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::corrupt, what).at_key("optim");
}

const Value& member(const Value& dict, std::string_view key, Kind kind) {
  const Value* found = dict.is(Kind::dict) ? dict.find(key) : nullptr;
  if (found == nullptr || !found->is(kind)) {
    refuse("an optimizer state without " + std::string(key) + " of the kind it has in PyTorch");
  }
  return *found;
}

// The name that a group's `param_names`, if they are there, give the parameter number i of `count`.
const std::string& given_name(const Value* names, std::size_t i, std::size_t count) {
  const bool fit = names != nullptr && names->is(Kind::list) && names->size() == count;
  if (!fit || !names->items()[i].is(Kind::string)) {
    throw Error(ErrorCode::mismatch,
                "parameters have numbers, and the group's param_names do "
                "not say what they are")
        .at_key("optim.param_groups");
  }
  return names->items()[i].as_string();
}

// Ids of parameters, as text, to clean names: what every group says.
std::map<std::string, std::string> names_by_id(const Value::List& groups) {
  std::map<std::string, std::string> names;
  for (const Value& group : groups) {
    const Value& params = member(group, "params", Kind::list);
    const Value* given = group.find("param_names");
    for (std::size_t i = 0; i < params.size(); ++i) {
      const Value& param = params.items()[i];
      if (param.is(Kind::string)) {
        names[param.as_string()] = sharded::clean_name(param.as_string());
        continue;
      }
      if (!param.is(Kind::integer)) refuse("a parameter is neither a name nor a number");
      names[render(param)] = sharded::clean_name(given_name(given, i, params.size()));
    }
  }
  return names;
}

std::string id_of(const Value& key) {
  return key.is(Kind::string) ? key.as_string() : render(key);
}

// The group with names in place of ids; `changed` when that makes a difference. `param_names` that
// stand beside names are left as they are: nothing reads them.
Value named_group(const Value& group, const std::map<std::string, std::string>& names,
                  bool& changed) {
  Value::List params;
  bool ids = false;
  for (const Value& param : member(group, "params", Kind::list).items()) {
    const std::string& name = names.at(id_of(param));
    const bool same = is_text(param, name);
    changed = changed || !same;
    ids = ids || !param.is(Kind::string);
    params.push_back(same ? param : Value(name));
  }
  Value copy = Value::dict();
  for (const auto& [key, value] : group.pairs()) {
    const bool replaced = is_text(key, "params") || (ids && is_text(key, "param_names"));
    copy.set_item(key, replaced ? Value::list(params) : value);
  }
  return copy;
}

// The value of a tree's only entry, when it holds a "model".
const Value* wrapped_state(const Value& tree) {
  if (tree.size() != 1) return nullptr;
  const Value& inner = tree.pairs()[0].second;
  return inner.is(Kind::dict) && find_dict(inner, "model") != nullptr ? &inner : nullptr;
}

bool has_tensors(const Value& tree) {
  return std::ranges::any_of(tree.pairs(),
                             [](const Value::Pair& pair) { return pair.second.is(Kind::tensor); });
}

// What is neither the model nor the optimizer: the entries of "train", and those beside it.
std::optional<Value> trainer_of(const Value& tree, const Value& model) {
  Value train = Value::dict();
  bool has_train = false;
  const Value* own = find_dict(tree, "train");
  for (const auto& [key, value] : tree.pairs()) {
    if (value.identity() == model.identity() || is_text(key, "optim")) continue;
    has_train = true;
    if (own != nullptr && value.identity() == own->identity()) {
      for (const auto& [name, inner] : own->pairs()) train.set_item(name, inner);
    } else {
      train.set_item(key, value);
    }
  }
  if (!has_train) return std::nullopt;
  return own != nullptr && train.size() == own->size() ? *own : train;
}

// The states by the names of their parameters.
Value named_states(const Value& state, const std::map<std::string, std::string>& names,
                   bool& changed) {
  Value named = Value::dict();
  for (const auto& [key, value] : state.pairs()) {
    const auto found = names.find(id_of(key));
    if (found == names.end() && !key.is(Kind::string)) refuse("state of a parameter in no group");
    const std::string name =
        found == names.end() ? sharded::clean_name(key.as_string()) : found->second;
    const bool same = is_text(key, name);
    changed = changed || !same;
    if (named.find(name) != nullptr) refuse("two states for the parameter " + name);
    named.set_item(same ? key : Value(name), value);
  }
  return named;
}

}  // namespace

Value clean_model(const Value& model) {
  bool changed = model.dict_kind() != DictKind::ordered_dict;
  std::vector<Value::Pair> pairs;
  std::map<std::string, int> seen;
  for (const auto& [key, value] : model.pairs()) {
    if (!key.is(Kind::string)) {
      throw Error(ErrorCode::mismatch, "a model's names are strings, one is " + render(key, 60));
    }
    const std::string name = sharded::clean_name(key.as_string());
    if (seen[name]++ > 0) {
      throw Error(ErrorCode::conflict, "two parameters have this name").at_key("model." + name);
    }
    const bool same = name == key.as_string();
    changed = changed || !same;
    pairs.emplace_back(same ? key : Value(name), value);
  }
  return changed ? copy_of(model, std::move(pairs), DictKind::ordered_dict) : model;
}

Value named_optim(const Value& optim) {
  // An optimizer without state of its own loses the empty dict in a flat checkpoint.
  const Value state =
      optim.find("state") == nullptr ? Value::dict() : member(optim, "state", Kind::dict);
  const Value& groups = member(optim, "param_groups", Kind::list);
  const std::map<std::string, std::string> names = names_by_id(groups.items());
  bool changed = false;
  Value::List named_groups;
  for (const Value& group : groups.items()) {
    named_groups.push_back(named_group(group, names, changed));
  }
  const Value named_state = named_states(state, names, changed);
  if (!changed) return optim;
  Value result = Value::dict();
  for (const auto& [key, value] : optim.pairs()) {
    result.set_item(key, is_text(key, "state")          ? named_state
                         : is_text(key, "param_groups") ? Value::list(named_groups)
                                                        : value);
  }
  return result;
}

Value OlmoState::tree() const {
  Value whole = Value::dict({{"model", model}});
  if (optim) whole.set_item("optim", *optim);
  if (train) whole.set_item("train", *train);
  return whole;
}

OlmoState olmo_state_of(const Value& tree) {
  if (!tree.is(Kind::dict)) {
    throw Error(ErrorCode::mismatch, "the checkpoint is " + std::string(describe(tree.kind())) +
                                         ", expected a model or a training state");
  }
  const Value* model = find_dict(tree, "model");
  if (model == nullptr) {
    if (const Value* inner = wrapped_state(tree)) return olmo_state_of(*inner);
    if (!has_tensors(tree)) throw Error(ErrorCode::mismatch, "the checkpoint has no model");
    return {.model = clean_model(tree), .optim = {}, .train = {}};
  }
  OlmoState state;
  state.model = clean_model(*model);
  if (const Value* optim = find_dict(tree, "optim")) state.optim = named_optim(*optim);
  state.train = trainer_of(tree, *model);
  return state;
}

}  // namespace tessera
