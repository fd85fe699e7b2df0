// The leaves of a checkpoint under the names of a training that takes it up (checkpoint-rows O-41,
// O-42, O-73).
#include <algorithm>
#include <map>
#include <set>
#include <string_view>
#include <utility>

#include "checkpoint/open/olmo_state.h"
#include "checkpoint/open/open.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kState = "state";
constexpr const char* kGroups = "param_groups";

bool has_step(const Leaf& leaf, std::size_t step, std::string_view text) {
  if (leaf.path.size() <= step) return false;
  const auto* key = std::get_if<std::string>(&leaf.path[step]);
  return key != nullptr && *key == text;
}

bool is_below(const Leaf& leaf, std::string_view part) {
  return leaf.path.size() > 1 && has_step(leaf, 0, part);
}

bool any_below(const std::vector<Leaf>& leaves, std::string_view part) {
  return std::ranges::any_of(leaves, [&](const Leaf& leaf) { return is_below(leaf, part); });
}

Leaf moved(const Leaf& leaf, Path path) {
  std::string name = dotted(path);
  return {std::move(name), std::move(path), leaf.value};
}

Path tail_of(const Path& path) {
  return {path.begin() + 1, path.end()};
}

// Whether all leaves lie below one key, and below that there is a model.
bool is_wrapped(const std::vector<Leaf>& leaves) {
  bool model = false;
  for (const Leaf& leaf : leaves) {
    if (leaf.path.size() < 2 || leaf.path[0] != leaves[0].path[0]) return false;
    model = model || (leaf.path.size() > 2 && has_step(leaf, 1, kModel));
  }
  return model;
}

// The leaves of a training state, whatever holds it.
std::vector<Leaf> leaves_of_state(const std::vector<Leaf>& stored) {
  if (any_below(stored, kModel) || any_below(stored, kOptim)) return stored;
  std::vector<Leaf> leaves;
  const bool wrapped = is_wrapped(stored);
  for (const Leaf& leaf : stored) {
    if (wrapped) {
      leaves.push_back(moved(leaf, tail_of(leaf.path)));
    } else {
      Path path{kModel};
      path.insert(path.end(), leaf.path.begin(), leaf.path.end());
      leaves.push_back(moved(leaf, std::move(path)));
    }
  }
  return leaves;
}

std::string name_in_model(const Leaf& leaf) {
  return dotted(tail_of(leaf.path));
}

void add_names_of_groups(const Value& groups, std::vector<std::string>& names) {
  std::set<std::string> known(names.begin(), names.end());
  for (const Value& group : groups.items()) {
    for (const Value& name : group.at("params").items()) {
      if (known.insert(name.as_string()).second) names.push_back(name.as_string());
    }
  }
}

// Which names a stored one gets.
class Renaming {
 public:
  Renaming(const std::vector<std::string>& stored, const LiveNames& live, const NameRules& rules)
      : rules_(rules) {
    std::vector<std::string> names = live.names;
    if (live.groups) {
      std::vector<std::string> of_groups;
      add_names_of_groups(*live.groups, of_groups);
      optimized_.emplace(of_groups.begin(), of_groups.end());
      add_names_of_groups(*live.groups, names);
    }
    for (const auto& [name, from] : match_names(stored, names, rules)) live_[from].push_back(name);
  }

  [[nodiscard]] std::vector<std::string> of(const std::string& stored) const {
    const auto found = live_.find(stored);
    if (found != live_.end()) return found->second;
    return {without_wrappers(stored, rules_)};
  }

  // Those that the live optimizer has: of tied parameters a model has more.
  [[nodiscard]] std::vector<std::string> in_optimizer(const std::string& stored) const {
    std::vector<std::string> names = of(stored);
    if (!optimized_) return names;
    const auto is_strange = [&](const std::string& name) { return !optimized_->contains(name); };
    if (std::ranges::all_of(names, is_strange)) return {without_wrappers(stored, rules_)};
    std::erase_if(names, is_strange);
    return names;
  }

 private:
  const NameRules& rules_;
  std::map<std::string, std::vector<std::string>> live_;  // by stored name
  std::optional<std::set<std::string>> optimized_;        // none: not known
};

// The optimizer's part with names in place of numbers; none: there is none that has groups.
std::optional<Value> optim_of(const std::vector<Leaf>& leaves) {
  std::vector<Leaf> below;
  bool has_groups = false;
  for (const Leaf& leaf : leaves) {
    if (!is_below(leaf, kOptim)) continue;
    has_groups = has_groups || has_step(leaf, 1, kGroups);
    below.push_back(moved(leaf, tail_of(leaf.path)));
  }
  if (!has_groups) return std::nullopt;
  fill_holes(below);
  return named_optim(unflatten(below));
}

// The names of the model and of the optimizer: of tied parameters a model has more. Both have no
// wrappers of FSDP any more where they are matched.
std::vector<std::string> stored_names(const std::vector<Leaf>& leaves,
                                      const std::optional<Value>& optim, const NameRules& rules) {
  std::vector<std::string> names;
  for (const Leaf& leaf : leaves) {
    if (is_below(leaf, kModel)) names.push_back(without_wrappers(name_in_model(leaf), rules));
  }
  if (optim) add_names_of_groups(optim->at(kGroups), names);
  return names;
}

void add_group_name(const std::string& name, std::set<std::string>& taken, Value::List& names) {
  if (!taken.insert(name).second) {
    throw Error(ErrorCode::mismatch,
                "a group of the optimizer would lose a parameter: two get this name")
        .at_key(printable(name, 200));
  }
  names.emplace_back(name);
}

// `taken`: the names in all groups so far.
Value renamed_group(const Value& group, const Renaming& renaming, std::set<std::string>& taken) {
  Value::List names;
  for (const Value& stored : group.at("params").items()) {
    for (const std::string& name : renaming.in_optimizer(stored.as_string()))
      add_group_name(name, taken, names);
  }
  Value copy = Value::dict(group.pairs());
  copy.set_item("params", Value::list(names));
  if (group.find("param_names") != nullptr) copy.set_item("param_names", Value::list(names));
  return copy;
}

// Adaptive clipping keeps it on all ranks, also where a rank has nothing else of a parameter.
Value without_norms(const Value& state) {
  if (!state.is(Kind::dict)) return state;
  Value kept = Value::dict(state.pairs());
  kept.erase("grad_norm_exp_avg");
  return kept;
}

Value renamed_states(const Value& states, const Renaming& renaming, CheckpointKind kind) {
  Value renamed = Value::dict();
  for (const auto& [key, stored] : states.pairs()) {
    const Value state = kind == CheckpointKind::olmo_local ? without_norms(stored) : stored;
    if (state.is(Kind::dict) && state.size() == 0) continue;
    for (const std::string& name : renaming.in_optimizer(key.as_string())) {
      if (renamed.find(name) != nullptr)
        throw Error(ErrorCode::conflict, "two states of one parameter").at_key(printable(name));
      renamed.set_item(name, state);
    }
  }
  return renamed;
}

Value renamed_optim(const Value& optim, const Renaming& renaming, const LiveNames& live,
                    CheckpointKind kind) {
  Value::List groups;
  std::set<std::string> taken;
  for (const Value& group : optim.at(kGroups).items())
    groups.push_back(renamed_group(group, renaming, taken));
  const Value renamed = Value::list(std::move(groups));
  Value result = Value::dict(optim.pairs());
  if (const Value* states = optim.find(kState))
    result.set_item(kState, renamed_states(*states, renaming, kind));
  result.set_item(kGroups, live.groups ? fit_groups(renamed, *live.groups) : renamed);
  return result;
}

void add_model_leaf(const Leaf& leaf, const Renaming& renaming, const NameRules& rules,
                    std::vector<Leaf>& leaves) {
  const std::string stored = name_in_model(leaf);
  for (const std::string& name : renaming.of(without_wrappers(stored, rules))) {
    if (name == stored) {
      leaves.push_back(leaf);
    } else {
      leaves.push_back(moved(leaf, {kModel, name}));
    }
  }
}

void require_own_names(const std::vector<Leaf>& leaves) {
  std::set<std::string_view> names;
  for (const Leaf& leaf : leaves) {
    if (!names.insert(leaf.name).second)
      throw Error(ErrorCode::conflict, "two leaves get one name").at_key(printable(leaf.name));
  }
}

}  // namespace

Checkpoint as_training_state(const Checkpoint& stored, const LiveNames& live,
                             const NameRules& rules) {
  const std::vector<Leaf> leaves = leaves_of_state(stored.leaves);
  const std::optional<Value> optim = optim_of(leaves);
  const Renaming renaming(stored_names(leaves, optim, rules), live, rules);
  Checkpoint made = stored;
  made.mapped = true;
  made.root.reset();
  made.files.clear();  // those that tensors lie in are known by their pieces
  made.leaves.clear();
  for (const Leaf& leaf : leaves) {
    if (is_below(leaf, kModel)) {
      add_model_leaf(leaf, renaming, rules, made.leaves);
    } else if (!optim || !is_below(leaf, kOptim)) {
      made.leaves.push_back(leaf);
    }
  }
  if (optim) {
    const Value renamed = renamed_optim(*optim, renaming, live, stored.kind);
    for (Leaf& leaf : leaves_of(Value::dict({{kOptim, renamed}})))
      made.leaves.push_back(std::move(leaf));
  }
  require_own_names(made.leaves);
  index_names(made);
  return made;
}

}  // namespace tessera
