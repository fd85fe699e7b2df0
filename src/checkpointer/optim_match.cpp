#include "checkpointer/optim_match.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

#include "format/sharded/sharded.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

using Kind = Value::Kind;

Error group_error(std::size_t group, const std::string& what) {
  return Error(ErrorCode::mismatch, what)
      .at_key("optim.param_groups." + std::to_string(group) + ".params");
}

// The steps from a dict to its entries, as leaves of a checkpoint have them.
PathPart step_of(const Value& key) {
  if (key.is(Kind::string)) return key.as_string();
  return DictKey{.text = std::to_string(key.as_int()), .key = key};
}

// What a checkpoint calls the parameters of its optimizer.
class StoredNames {
 public:
  explicit StoredNames(const Value::List& groups) {
    for (std::size_t g = 0; g < groups.size(); ++g) add(g, groups[g]);
  }

  // The parameters of a group, in order.
  [[nodiscard]] Value in_group(std::size_t group) const { return Value::list(orders_.at(group)); }
  // The groups of these parameters.
  [[nodiscard]] const std::map<std::string, std::size_t>& groups() const { return groups_; }
  // The clean name of what has this key in the state.
  [[nodiscard]] std::string name_of(const Value& key) const {
    if (key.is(Kind::string)) return sharded::clean_name(key.as_string());
    const auto found = by_number_.find(key.as_int());
    if (found != by_number_.end()) return found->second;
    throw Error(ErrorCode::corrupt, "state of a parameter that is in no group")
        .at_key("optim.state." + std::to_string(key.as_int()));
  }

 private:
  void add(std::size_t group, const Value& stored) {
    auto& order = orders_.emplace_back();
    const auto& params = stored.at("params").items();
    const Value* given = stored.find("param_names");
    for (std::size_t i = 0; i < params.size(); ++i) {
      auto name = name_in(group, params, given, i);
      if (!groups_.emplace(name, group).second)
        throw group_error(group, "parameter '" + name + "' is in two places");
      order.emplace_back(name);
      if (params[i].is(Kind::integer)) by_number_.emplace(params[i].as_int(), std::move(name));
    }
  }

  static std::string name_in(std::size_t group, const Value::List& params, const Value* given,
                             std::size_t i) {
    if (params[i].is(Kind::string)) return sharded::clean_name(params[i].as_string());
    if (given == nullptr || given->size() != params.size())
      throw group_error(group, "parameters have numbers, and param_names do not say what they are");
    return sharded::clean_name(given->items()[i].as_string());
  }

  std::vector<Value::List> orders_;
  std::map<std::string, std::size_t> groups_;
  std::map<std::int64_t, std::string> by_number_;
};

bool has_no_decay(const Value& group) {
  const Value* decay = group.find("weight_decay");
  return decay != nullptr && decay->as_real() == 0.0;
}

// OLMo once had one group where it has two now: with weight decay, and without (O-13).
bool is_split(const Value::List& stored, const Value::List& live) {
  return stored.size() == 1 && live.size() == 2;
}

std::set<std::string> params_of(const Value& group) {
  std::set<std::string> names;
  for (const Value& name : group.at("params").items()) names.insert(name.as_string());
  return names;
}

// The checkpoint's group that has all of `names`.
std::size_t group_of(std::size_t live_group, const std::set<std::string>& names,
                     const StoredNames& stored) {
  std::optional<std::size_t> found;
  for (const auto& name : names) {
    const auto at = stored.groups().find(name);
    if (at == stored.groups().end()) continue;  // require_same tells of it
    if (found && *found != at->second) {
      throw group_error(live_group, "parameter '" + name +
                                        "' is in another group of the checkpoint than '" +
                                        *names.begin() + "'");
    }
    found = at->second;
  }
  // An empty group takes the options of the one at its place.
  return found.value_or(live_group);
}

// The same parameters, in whatever groups.
void require_same(const StoredNames& stored, const std::set<std::string>& live) {
  for (const auto& [name, group] : stored.groups()) {
    if (live.contains(name)) continue;
    throw group_error(group,
                      "the optimizer lacks parameter '" + name + "', which the checkpoint's has");
  }
  for (const auto& name : live) {
    if (stored.groups().contains(name)) continue;
    throw group_error(0, "the checkpoint's optimizer lacks parameter '" + name + "'");
  }
}

void require_distinct(const std::vector<std::size_t>& groups) {
  std::set<std::size_t> seen;
  for (const auto group : groups) {
    if (!seen.insert(group).second)
      throw group_error(group, "parameters of one group of the checkpoint are in two here");
  }
}

void require_as_many(const Value::List& stored, const Value::List& live) {
  if (stored.size() == live.size()) return;
  const auto counts =
      std::to_string(stored.size()) + " groups, this one " + std::to_string(live.size());
  if (!is_split(stored, live)) {
    throw Error(ErrorCode::mismatch, "the checkpoint's optimizer has " + counts)
        .at_key("optim.param_groups");
  }
  if (has_no_decay(live[1])) return;
  throw Error(ErrorCode::mismatch,
              "the checkpoint's one group can become two only if the second has no weight decay")
      .at_key("optim.param_groups.1.weight_decay");
}

// A group of the checkpoint for the parameters of a live one.
Value fitted(const Value& stored, const Value& live, bool without_decay) {
  auto group = Value::dict(stored.pairs());
  group.set_item("params", live.at("params"));
  if (without_decay) group.set_item("weight_decay", 0.0);
  return group;
}

const Value::List& groups_in(const Value& optim) {
  const Value* groups = optim.is(Kind::dict) ? optim.find("param_groups") : nullptr;
  if (groups != nullptr && groups->is(Kind::list)) return groups->items();
  throw Error(ErrorCode::not_found, "the checkpoint has no such part of an optimizer's state")
      .at_key("optim.param_groups");
}

}  // namespace

OptimMatch match_optim(const Value& stored, const Value& live) {
  const auto& theirs = groups_in(stored);
  const auto& ours = groups_in(live);
  require_as_many(theirs, ours);
  const StoredNames names(theirs);
  OptimMatch match;
  match.is_split = theirs.size() != ours.size();
  std::set<std::string> taken;
  Value::List groups;
  for (std::size_t g = 0; g < ours.size(); ++g) {
    const auto params = params_of(ours[g]);
    match.groups.push_back(match.is_split ? 0 : group_of(g, params, names));
    match.orders.push_back(match.is_split ? Value() : names.in_group(match.groups.back()));
    groups.push_back(fitted(theirs[match.groups.back()], ours[g], match.is_split && g == 1));
    taken.insert(params.begin(), params.end());
  }
  require_same(names, taken);
  if (!match.is_split) require_distinct(match.groups);
  auto state = Value::dict();
  const Value* states = stored.find("state");
  if (states != nullptr) {
    for (const auto& [key, value] : states->pairs()) {
      const auto name = names.name_of(key);
      state.set_item(name, value);
      match.keys.emplace(name, step_of(key));
    }
  }
  match.stored =
      Value::dict({{"state", std::move(state)}, {"param_groups", Value::list(std::move(groups))}});
  return match;
}

}  // namespace tessera::detail
