#include "checkpoint/open/olmo_state.h"

#include <algorithm>
#include <map>
#include <set>

#include "base/expression.h"
#include "format/sharded/sharded.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

const Value* find_dict(const Value& tree, std::string_view key) {
  return find_entry_of_kind(tree, key, Kind::dict);
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
  const Value* found = find_entry_of_kind(dict, key, kind);
  if (found == nullptr) {
    refuse("an optimizer state without " + std::string(key) + " of the kind it has in PyTorch");
  }
  return *found;
}

bool is_list_of(std::size_t count, const Value* value) {
  return value != nullptr && value->is(Kind::list) && value->size() == count;
}

// The name that a group's `param_names`, if they are there, give the parameter number i of `count`.
const std::string& given_name(const Value* names, std::size_t i, std::size_t count) {
  if (!is_list_of(count, names) || !names->items()[i].is(Kind::string)) {
    throw Error(ErrorCode::mismatch,
                "parameters have numbers, and the group's param_names do "
                "not say what they are")
        .at_key("optim.param_groups");
  }
  return names->items()[i].as_string();
}

using NameById = std::map<std::string, std::string>;  // ids as text

void add_names_of(const Value& group, NameById& names) {
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

// The clean names of all parameters: what every group says.
NameById names_by_id(const Value::List& groups) {
  NameById names;
  for (const Value& group : groups) add_names_of(group, names);
  return names;
}

std::string id_of(const Value& key) {
  return key.is(Kind::string) ? key.as_string() : render(key);
}

// `key` itself where it is this name already; otherwise the name, which is noted in `changed`.
Value renamed(const Value& key, const std::string& name, bool& changed) {
  if (is_text(key, name)) return key;
  changed = true;
  return name;
}

// The group with names in place of ids; `changed` when that makes a difference. `param_names` that
// stand beside names are left as they are: nothing reads them.
Value named_group(const Value& group, const NameById& names, bool& changed) {
  const Value::List& given = member(group, "params", Kind::list).items();
  Value::List params;
  for (const Value& param : given)
    params.push_back(renamed(param, names.at(id_of(param)), changed));
  const bool ids =
      std::ranges::any_of(given, [](const Value& param) { return !param.is(Kind::string); });
  Value copy = Value::dict(group.pairs());
  copy.set_item("params", Value::list(params));
  if (ids && copy.find("param_names") != nullptr) copy.set_item("param_names", Value::list(params));
  return copy;
}

// The value of a tree's only entry, when it holds a "model".
const Value* wrapped_state(const Value& tree) {
  if (tree.size() != 1) return nullptr;
  const Value& inner = tree.pairs()[0].second;
  return find_dict(inner, "model") != nullptr ? &inner : nullptr;
}

bool has_tensors(const Value& tree) {
  return std::ranges::any_of(tree.pairs(),
                             [](const Value::Pair& pair) { return pair.second.is(Kind::tensor); });
}

bool is_node(const Value& value, const Value* node) {
  return node != nullptr && value.identity() == node->identity();
}

// The entries of a tree that are neither the model nor the optimizer.
std::vector<Value::Pair> entries_of_trainer(const Value& tree, const Value& model) {
  std::vector<Value::Pair> entries = tree.pairs();
  std::erase_if(entries, [&model](const Value::Pair& entry) {
    return is_node(entry.second, &model) || is_text(entry.first, "optim");
  });
  return entries;
}

// The trainer's state: the entries of "train", and those beside it.
std::optional<Value> trainer_of(const Value& tree, const Value& model) {
  const std::vector<Value::Pair> entries = entries_of_trainer(tree, model);
  if (entries.empty()) return std::nullopt;
  const Value* own = find_dict(tree, "train");
  Value train = Value::dict();
  for (const auto& [key, value] : entries) {
    if (is_node(value, own)) {
      for (const auto& [name, inner] : own->pairs()) train.set_item(name, inner);
    } else {
      train.set_item(key, value);
    }
  }
  return own != nullptr && train.size() == own->size() ? *own : train;
}

// What a state is of, which goes by an id or a name.
std::string name_of_state(const Value& key, const NameById& names) {
  const auto found = names.find(id_of(key));
  if (found != names.end()) return found->second;
  if (!key.is(Kind::string)) refuse("state of a parameter in no group");
  return sharded::clean_name(key.as_string());
}

// The states by the names of their parameters.
Value named_states(const Value& state, const NameById& names, bool& changed) {
  Value named = Value::dict();
  for (const auto& [key, value] : state.pairs()) {
    const std::string name = name_of_state(key, names);
    if (named.find(name) != nullptr) refuse("two states for the parameter " + name);
    named.set_item(renamed(key, name, changed), value);
  }
  return named;
}

// An optimizer without state of its own loses the empty dict in a flat checkpoint.
Value state_of_optim(const Value& optim) {
  return optim.find("state") == nullptr ? Value::dict() : member(optim, "state", Kind::dict);
}

std::string clean_key(const Value& key) {
  if (key.is(Kind::string)) return sharded::clean_name(key.as_string());
  throw Error(ErrorCode::mismatch, "a model's names are strings, one is " + render(key, 60));
}

// The state in a tree that has no dict "model".
OlmoState state_without_model(const Value& tree) {
  if (const Value* inner = wrapped_state(tree)) return olmo_state_of(*inner);
  if (!has_tensors(tree)) throw Error(ErrorCode::mismatch, "the checkpoint has no model");
  return {.model = clean_model(tree), .optim = {}, .train = {}};
}

}  // namespace

Value clean_model(const Value& model) {
  bool changed = model.dict_kind() != DictKind::ordered_dict;
  std::vector<Value::Pair> pairs;
  std::set<std::string> names;
  for (const auto& [key, value] : model.pairs()) {
    const std::string name = clean_key(key);
    if (!names.insert(name).second)
      throw Error(ErrorCode::conflict, "two parameters have this name").at_key("model." + name);
    pairs.emplace_back(renamed(key, name, changed), value);
  }
  return changed ? copy_of(model, std::move(pairs), DictKind::ordered_dict) : model;
}

Value named_optim(const Value& optim) {
  const Value state = state_of_optim(optim);
  const Value& groups = member(optim, "param_groups", Kind::list);
  const NameById names = names_by_id(groups.items());
  bool changed = false;
  Value::List named_groups;
  for (const Value& group : groups.items()) {
    named_groups.push_back(named_group(group, names, changed));
  }
  const Value named_state = named_states(state, names, changed);
  if (!changed) return optim;
  Value result = Value::dict(optim.pairs());
  if (optim.find("state") != nullptr) result.set_item("state", named_state);
  result.set_item("param_groups", Value::list(std::move(named_groups)));
  return result;
}

Value OlmoState::tree() const {
  Value whole = Value::dict({{"model", model}});
  if (optim) whole.set_item("optim", *optim);
  if (train) whole.set_item("train", *train);
  return whole;
}

OlmoState olmo_state_of(const Value& tree, OlmoParts parts) {
  if (!tree.is(Kind::dict)) {
    throw Error(ErrorCode::mismatch, "the checkpoint is " + std::string(describe(tree.kind())) +
                                         ", expected a model or a training state");
  }
  const Value* model = find_dict(tree, "model");
  if (model == nullptr) return state_without_model(tree);
  OlmoState state;
  state.model = clean_model(*model);
  if (parts == OlmoParts::model) return state;
  if (const Value* optim = find_dict(tree, "optim")) state.optim = named_optim(*optim);
  state.train = trainer_of(tree, *model);
  return state;
}

namespace {

constexpr const char* kFirstRank = "model/rank0.pt";
// Bytes: each module around a name is matched, which may take the square of this.
constexpr std::size_t kLongestName = 1024;

// The paths of the modules around `name`, outermost first: "a", "a.b" for "a.b.weight".
std::vector<std::string> modules_around(const std::string& name) {
  std::vector<std::string> paths;
  for (std::size_t dot = name.find('.'); dot != std::string::npos; dot = name.find('.', dot + 1)) {
    paths.push_back(name.substr(0, dot));
  }
  return paths;
}

bool has_alignment(const Value& handle) {
  const Value* padded = handle.find("flat_param._numels_with_padding");
  return padded != nullptr && padded->size() > handle.at("flat_param._numels").size();
}

// What the source's flat parameters have besides their elements.
struct Padding {
  bool longer = false;  // one is aligned
  bool zeros = false;   // one was filled up to a multiple of the ranks

  void add(const Value& handle) {
    longer = longer || has_alignment(handle);
    zeros = zeros || handle.at("flat_param._shard_numel_padded").as_int() > 0;
  }
  // Nothing speaks against alignment where nothing needed padding.
  [[nodiscard]] bool aligned() const { return longer || !zeros; }
};

// The path of a module in a rank's file, without wrappers.
std::string path_of(const Value& module) {
  std::string path = sharded::clean_name(module.at("name").as_string() + ".");
  if (!path.empty()) path.pop_back();
  return path;
}

void require_matchable(const std::string& name) {
  if (name.size() <= kLongestName) return;
  throw Error(ErrorCode::limit, "a parameter's name of " + std::to_string(name.size()) +
                                    " bytes, expected at most " + std::to_string(kLongestName));
}

// The parameters of a flat one, which are `missing` until then.
void add_names(const Value& handle, FlatUnit& unit, std::set<std::string>& missing) {
  for (const Value& fqn : handle.at("flat_param._fqns").items()) {
    const std::string inner = sharded::clean_name(fqn.as_string());
    unit.names.push_back(unit.path.empty() ? inner : unit.path + "." + inner);
    if (missing.erase(unit.names.back()) == 0) {
      throw Error(ErrorCode::mismatch,
                  "the source's flat parameters hold a parameter that is "
                  "not converted, or twice")
          .at_key(unit.names.back());
    }
  }
}

}  // namespace

UnitPlan UnitPlan::by_expression(const std::vector<std::string>& names, const std::string& unit) {
  const Expression expression(unit);
  UnitPlan plan;
  plan.units_.push_back({});
  std::map<std::string, std::size_t> index;  // path -> units_
  for (const std::string& name : names) {
    require_matchable(name);
    std::size_t owner = 0;
    for (const std::string& path : modules_around(name)) {
      if (!expression.matches(path)) continue;
      const auto [found, added] = index.emplace(path, plan.units_.size());
      if (added) plan.units_.push_back({path, {}});
      plan.modules_.insert(path);
      owner = found->second;
    }
    plan.units_[owner].names.push_back(name);
  }
  return plan;
}

UnitPlan UnitPlan::of_local(const Store& store, const std::vector<std::string>& names) {
  const Value file = torch_file::read(store.open(kFirstRank));
  UnitPlan plan;
  std::set<std::string> missing(names.begin(), names.end());
  Padding padding;
  for (const Value& module : file.at("modules").items()) {
    FlatUnit unit{path_of(module), {}};
    for (const Value& handle : module.at("handles").items()) {
      add_names(handle, unit, missing);
      padding.add(handle);
    }
    if (!unit.path.empty()) plan.modules_.insert(unit.path);
    plan.units_.push_back(std::move(unit));
  }
  if (!missing.empty()) {
    throw Error(ErrorCode::mismatch, "no flat parameter of the source holds this parameter")
        .at_key(*missing.begin());
  }
  plan.aligned_ = padding.aligned();
  return plan;
}

UnitPlan UnitPlan::of_units(std::vector<FlatUnit> units, bool aligned,
                            const std::vector<std::string>& names) {
  UnitPlan plan;
  std::set<std::string> missing(names.begin(), names.end());
  for (const FlatUnit& unit : units) {
    if (!unit.path.empty()) plan.modules_.insert(unit.path);
    for (const std::string& name : unit.names) {
      if (!unit.path.empty() && !name.starts_with(unit.path + ".")) {
        throw Error(ErrorCode::invalid_argument,
                    "a parameter that is not below its module " + unit.path)
            .at_key("model." + name);
      }
      if (missing.erase(name) == 1) continue;
      throw Error(ErrorCode::mismatch,
                  "the flat parameters hold a parameter that the model lacks, or twice")
          .at_key("model." + name);
    }
  }
  if (!missing.empty()) {
    throw Error(ErrorCode::mismatch, "no flat parameter holds this parameter")
        .at_key("model." + *missing.begin());
  }
  plan.units_ = std::move(units);
  plan.aligned_ = aligned;
  return plan;
}

std::string UnitPlan::wrapped(const std::string& path) const {
  if (path.empty()) return "";
  return sharded::wrapped_name(path, [this](const std::string& module) {
    return module.empty() || modules_.contains(module);
  });
}

}  // namespace tessera
