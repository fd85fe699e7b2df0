#include "optim_state/optim_leaves.h"

#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/text.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

constexpr const char* kParamGroups = "param_groups";
constexpr const char* kParams = "params";
constexpr const char* kParamNames = "param_names";  // OLMo's

Value with_loaded_values(const Value& own, const Value& loaded);

Value list_with_loaded(const Value& own, const Value& loaded) {
  Value::List items;
  std::ranges::transform(own.items(), loaded.items(), std::back_inserter(items),
                         with_loaded_values);
  return Value::list(std::move(items));
}

Value dict_with_loaded(const Value& own, const Value& loaded) {
  std::vector<Value::Pair> pairs;
  for (const auto& [key, item] : own.pairs()) {
    const auto* found = loaded.find_key(key);
    pairs.emplace_back(key, found == nullptr ? item : with_loaded_values(item, *found));
  }
  return Value::dict(std::move(pairs), own.dict_kind());
}

// The optimizer's own tensors that were loaded into, and of everything else what was loaded.
Value with_loaded_values(const Value& own, const Value& loaded) {
  if (own.is(Value::Kind::tensor) && loaded.is(Value::Kind::tensor)) return own;
  if (own.kind() != loaded.kind()) return loaded;
  if (own.is(Value::Kind::list) && own.size() == loaded.size())
    return list_with_loaded(own, loaded);
  return own.is(Value::Kind::dict) ? dict_with_loaded(own, loaded) : loaded;
}

// A count of steps is a tensor here, and a number where C++'s optimizers and PyTorch before 1.12
// wrote it: such a number is asked for as it is.
void ask_for_numbers(Value& state, const Value& stored) {
  if (!state.is(Value::Kind::dict) || !stored.is(Value::Kind::dict)) return;
  const auto pairs = state.pairs();
  for (const auto& [key, own] : pairs) {
    const auto* found = stored.find_key(key);
    const bool is_scalar = own.is(Value::Kind::tensor) && own.as_tensor().shape.empty();
    if (is_scalar && found != nullptr &&
        is_one_of(found->kind(), Value::Kind::integer, Value::Kind::real))
      state.set_item(key, *found);
  }
}

bool is_of_shape(const Tensor& leaf, at::IntArrayRef sizes) {
  return at::IntArrayRef(leaf.shape) == sizes;
}

at::Tensor memory_of(const Tensor& leaf) {
  if (numel(leaf.shape) > 0) return tensor_of(leaf);
  return at::empty(leaf.shape, scalar_type_of(leaf.dtype));
}

// This rank's part of a whole parameter's state.
Value part_leaf(const at::Tensor& held, const ShardedParameter& parameter) {
  auto leaf = parameter.flat
                  ? flat_leaf_of(held.reshape({-1}), parameter.shape, parameter.offset)
                  : sharded_leaf_of(held, parameter.shape, parameter.offset, parameter.dim);
  leaf.placement = parameter.placement;
  return leaf;
}

// A rank that holds nothing of an original parameter of FSDP1 has no gradients of it and does not
// count its steps: other ranks say how many there were.
bool counts_steps(const ShardedParameter& parameter) {
  if (parameter.local.numel() > 0 || numel(parameter.shape) == 0) return true;
  const auto home = parameter.home.lock();
  return !home || !home->leaves_out_empty();
}

// State that is not element by element, such as a number of steps: whole, the same on all ranks.
Value whole_leaf(const Tensor& leaf, const ShardedParameter& parameter) {
  auto copy = leaf;
  if (!counts_steps(parameter)) copy.pieces.clear();
  return copy;
}

void add_entries(const ShardedParameter& parameter, const Value& state, Value& into) {
  const auto is_part = [&](const Tensor& leaf) {
    return parameter.sharded && is_of_shape(leaf, parameter.local.sizes());
  };
  if (parameter.members.empty()) {
    into.set_item(parameter.name(), map_tensors(state, [&](const Tensor& leaf) {
                    return is_part(leaf) ? part_leaf(memory_of(leaf), parameter)
                                         : whole_leaf(leaf, parameter);
                  }));
  }
  for (const auto& member : parameter.members) {
    into.set_item(member.name, map_tensors(state, [&](const Tensor& leaf) -> Value {
                    if (!is_part(leaf)) return whole_leaf(leaf, parameter);
                    const auto held = memory_of(leaf).narrow(0, member.base, numel(member.range));
                    auto part = flat_leaf_of(held, member.shape, member.range.begin);
                    part.placement = member.placement;
                    return part;
                  }));
  }
}

// A parameter under which a checkpoint may have state.
struct Named {
  const std::string& name;
  const Shape& shape;
};

// The parameter itself, or those in a flat one.
std::vector<Named> named_in(const ShardedParameter& parameter) {
  if (parameter.members.empty()) return {{parameter.name(), parameter.shape}};
  std::vector<Named> all;
  for (const auto& member : parameter.members) all.push_back({member.name, member.shape});
  return all;
}

// The state that a checkpoint stores for a parameter, its tensors in the shapes that this rank has
// and without elements. `shape`: that of the parameter that it is stored for.
Value form_of(const Value& stored, const Shape& shape, const ShardedParameter& parameter) {
  return map_tensors(stored, [&](const Tensor& leaf) {
    Tensor form;
    form.dtype = leaf.dtype;
    form.shape = leaf.shape;
    if (parameter.sharded && is_of_shape(leaf, shape)) form.shape = parameter.local.sizes().vec();
    return Value(std::move(form));
  });
}

// In memory of its own: an optimizer may put another state where this one is.
Value copy_of(const Value& state) {
  return map_tensors(state, [](const Tensor& leaf) { return leaf_of(memory_of(leaf).clone()); });
}

Value zeros_of(const Value& form) {
  return map_tensors(form, [](const Tensor& leaf) {
    return leaf_of(at::zeros(leaf.shape, scalar_type_of(leaf.dtype)));
  });
}

bool has_form_of(const Value& a, const Value& b);

bool has_entries_of(const Value& a, const Value& b) {
  return a.size() == b.size() && std::ranges::all_of(a.pairs(), [&](const Value::Pair& pair) {
           const auto* other = b.find_key(pair.first);
           return other != nullptr && has_form_of(pair.second, *other);
         });
}

// The same keys, and tensors of the same shapes.
bool has_form_of(const Value& a, const Value& b) {
  if (a.kind() != b.kind()) return false;
  if (a.is(Value::Kind::tensor)) return a.as_tensor().shape == b.as_tensor().shape;
  if (a.is(Value::Kind::list)) return std::ranges::equal(a.items(), b.items(), has_form_of);
  return !a.is(Value::Kind::dict) || has_entries_of(a, b);
}

// A tree of the same containers in which nothing is known yet.
Value unknown_like(const Value& value) {
  if (!value.is(Value::Kind::dict)) return {};
  std::vector<Value::Pair> pairs;
  for (const auto& [key, item] : value.pairs()) pairs.emplace_back(key, unknown_like(item));
  return Value::dict(std::move(pairs));
}

// The entries of `group` that `known` has, or those that it lacks.
Value entries(const Value& group, const Value& known, bool that_it_has) {
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : group.pairs()) {
    if ((known.find_key(key) != nullptr) == that_it_has) pairs.emplace_back(key, value);
  }
  return Value::dict(std::move(pairs));
}

const Value& part_named(const Value& tree, const char* key) {
  const auto* found = tree.is(Value::Kind::dict) ? tree.find(key) : nullptr;
  if (found != nullptr) return *found;
  throw Error(ErrorCode::not_found, "the checkpoint has no such part of an optimizer's state")
      .at_key(key);
}

Error other_group(std::size_t group, const std::string& why) {
  return Error(ErrorCode::mismatch, why)
      .at_key(std::string(kParamGroups) + "." + std::to_string(group) + "." + kParams);
}

// The groups of a stored optimizer; none where there is none and may be none.
Value::List groups_in(const Value& stored, OnDifference missing) {
  const bool may_lack = missing == OnDifference::report && stored.is(Value::Kind::dict);
  if (may_lack && stored.find(kParamGroups) == nullptr) return {};
  return part_named(stored, kParamGroups).items();
}

using ParametersByTensor = std::unordered_map<const c10::TensorImpl*, const ShardedParameter*>;

const ShardedParameter& require_parameter(const ParametersByTensor& known,
                                          const at::Tensor& tensor) {
  const auto found = known.find(tensor.unsafeGetTensorImpl());
  if (found != known.end()) return *found->second;
  throw Error(ErrorCode::invalid_argument, "the optimizer has a parameter of shape " +
                                               to_string(tensor.sizes().vec()) +
                                               " that is not one of the model's");
}

// The names of a checkpoint's group, sorted, each once; empty: of what is none.
std::vector<std::string> listed_names(const Value& group) {
  std::vector<std::string> names;
  for (const auto& name : part_named(group, kParams).items())
    names.push_back(name.is(Value::Kind::string) ? name.as_string() : std::string());
  std::ranges::sort(names);
  const auto is_again = [](const auto& a, const auto& b) { return a == b && !a.empty(); };
  names.erase(std::unique(names.begin(), names.end(), is_again), names.end());
  return names;
}

}  // namespace

OptimLeaves::OptimLeaves(ModuleRef model, OptimizerRef optimizer)
    : optimizer_(std::move(optimizer)), parameters_(sharded_parameters(model)) {
  ParametersByTensor known;
  for (const auto& parameter : parameters_)
    known.emplace(parameter.local.unsafeGetTensorImpl(), &parameter);
  for (const auto& group : optimizer_.access().parameters()) {
    auto& held = groups_.emplace_back();
    std::unordered_set<const c10::TensorImpl*> seen;
    for (const auto& tensor : group) {
      const auto& parameter = require_parameter(known, tensor);
      // C++'s parameters() has a tied one as often as it has names.
      if (!seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      held.push_back({.parameter = &parameter, .key = named_in(parameter).front().name});
    }
  }
}

// A flat parameter stands for those in it.
std::vector<std::string> OptimLeaves::names_of(const std::vector<Held>& group) {
  std::vector<std::string> names;
  for (const auto& held : group) {
    for (const auto& one : named_in(*held.parameter)) names.push_back(one.name);
  }
  return names;
}

Value OptimLeaves::tree() {
  auto state = Value::dict();
  Value::List groups;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (auto& held : groups_[g]) {
      held.state = optimizer_.access().state(held.parameter->local);
      if (!held.state.is(Value::Kind::none)) add_entries(*held.parameter, held.state, state);
    }
    const auto names = names_of(groups_[g]);
    auto group = optimizer_.access().group(g);
    group.set_item(kParams, Value::list(Value::List(names.begin(), names.end())));
    groups.push_back(std::move(group));
  }
  return Value::dict({{"state", std::move(state)}, {kParamGroups, Value::list(std::move(groups))}});
}

void OptimLeaves::require_same_groups(const Value::List& groups) const {
  if (groups.size() != groups_.size()) {
    throw Error(ErrorCode::mismatch, "the checkpoint's optimizer has " +
                                         std::to_string(groups.size()) + " groups, this one " +
                                         std::to_string(groups_.size()))
        .at_key(kParamGroups);
  }
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const auto listed = listed_names(groups[g]);
    // Their order is that of units: state is found by name.
    auto ours = names_of(groups_[g]);
    std::ranges::sort(ours);
    if (listed == ours) continue;
    throw Error(ErrorCode::mismatch, "the group holds other parameters in the checkpoint (" +
                                         std::to_string(listed.size()) +
                                         ") than in the optimizer (" + std::to_string(ours.size()) +
                                         ")")
        .at_key(std::string(kParamGroups) + "." + std::to_string(g) + "." + kParams);
  }
}

// Parameters of this optimizer that are in none of the stored groups. Options go by the number of a
// group: new groups stand behind those of the checkpoint, and nothing else changes its group.
std::vector<std::string> OptimLeaves::unlisted(const Value::List& stored) const {
  std::map<std::string, std::size_t> group_of;
  for (std::size_t g = 0; g < stored.size(); ++g) {
    for (auto& name : listed_names(stored[g])) group_of.emplace(std::move(name), g);
  }
  std::vector<std::string> names;
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    bool knows_any = false;
    for (auto& name : names_of(groups_[g])) {
      const auto found = group_of.find(name);
      if (found == group_of.end()) {
        names.push_back(std::move(name));
        continue;
      }
      knows_any = true;
      if (found->second != g)
        throw other_group(
            g, name + " is in group " + std::to_string(found->second) + " of the checkpoint");
    }
    if (!knows_any && g < stored.size() && !listed_names(stored[g]).empty())
      throw other_group(g, "the checkpoint's group of this number holds none of its parameters");
  }
  return names;
}

void OptimLeaves::prepare(const Value& stored, OnDifference missing) {
  const auto stored_groups = groups_in(stored, missing);
  missing_.clear();
  if (missing == OnDifference::report) {
    missing_ = unlisted(stored_groups);
  } else {
    require_same_groups(stored_groups);
  }
  auto& access = optimizer_.access();
  for (std::size_t g = 0; g < std::min(groups_.size(), stored_groups.size()); ++g)
    access.check_group(g, stored_groups[g]);
  // A dict without entries is no part of a checkpoint.
  const auto* found = stored.find("state");
  const auto states = found == nullptr ? Value::dict() : *found;
  for (auto& group : groups_) {
    for (auto& held : group) prepare_state(held, states);
  }
}

void OptimLeaves::prepare_state(Held& held, const Value& states) {
  auto& access = optimizer_.access();
  const auto& parameter = *held.parameter;
  // Those in a flat one may be new: they begin with zeros.
  const auto is_stored = [&](const Named& one) { return states.find(one.name) != nullptr; };
  const auto all = named_in(parameter);
  const auto found = std::ranges::find_if(all, is_stored);
  const auto& [name, shape] = found == all.end() ? all.front() : *found;
  held.key = name;
  const auto* stored = states.find(name);
  const auto form = stored == nullptr ? Value() : form_of(*stored, shape, parameter);
  auto before = access.state(parameter.local);
  const bool has_new = stored != nullptr && !std::ranges::all_of(all, is_stored);
  if (!has_new && has_form_of(before, form)) return;
  before = copy_of(before);
  access.set_state(parameter.local, zeros_of(form), /*keep=*/true);
  held.before = std::move(before);
  held.is_new = true;
}

Value OptimLeaves::tree_like(const Value& stored) {
  auto made = tree();
  if (const auto* states = stored.find("state")) {
    for (const auto& [name, state] : states->pairs()) {
      const auto* ours = made.at("state").find_key(name);
      if (ours == nullptr) continue;
      auto asked = *ours;
      ask_for_numbers(asked, state);
    }
  }
  auto& groups = made.at(kParamGroups).items();
  const auto others = groups_in(stored, OnDifference::report);
  for (std::size_t g = 0; g < std::min(groups.size(), others.size()); ++g) {
    for (const auto& [key, value] : others[g].pairs()) {
      const bool is_known = groups[g].find_key(key) != nullptr || key == Value(kParamNames);
      if (!is_known) groups[g].set_item(key, unknown_like(value));
    }
  }
  return made;
}

Value::List OptimLeaves::finish(const Value& loaded) {
  auto& access = optimizer_.access();
  Value::List others;
  const auto& groups = loaded.at(kParamGroups).items();
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    for (const auto& held : groups_[g]) {
      if (held.state.is(Value::Kind::none)) continue;
      const auto& state = loaded.at("state").at(held.key);
      access.set_state(held.parameter->local, with_loaded_values(held.state, state), /*keep=*/true);
    }
    if (g >= groups.size()) {  // the list was taken as it was stored, without new groups
      others.push_back(Value::dict());
      continue;
    }
    const auto own = access.group(g);
    access.set_group(g, entries(groups[g], own, true));
    auto& rest = others.emplace_back(entries(groups[g], own, false));
    for (const auto* names : {kParams, kParamNames}) rest.erase(names);
  }
  return others;
}

void OptimLeaves::undo() {
  for (auto& group : groups_) {
    for (auto& held : group) {
      if (!std::exchange(held.is_new, false)) continue;
      optimizer_.access().set_state(held.parameter->local, held.before, /*keep=*/true);
    }
  }
}

LiveNames live_names(const Value& model, std::optional<OptimLeaves>& optimizer) {
  LiveNames live;
  for (const auto& pair : model.pairs()) live.names.push_back(pair.first.as_string());
  if (optimizer) live.groups = optimizer->tree().at(kParamGroups);
  return live;
}

}  // namespace tessera::detail
