// The groups of a stored optimizer for those of a live one (checkpoint-rows O-13).
#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "tessera/error.h"
#include "tessera/restore.h"
#include "value/children.h"
#include "value/equality.h"
#include "value/render.h"

namespace tessera {
namespace {

using Kind = Value::Kind;

// What OLMo's optimizers may have changed on purpose before they go on.
constexpr std::array<std::string_view, 4> kLiveKeys{"sharded", "max_grad_norm",
                                                    "max_grad_norm_ratio", "param_names"};

std::string place_of(std::size_t group) {
  return "optim.param_groups." + std::to_string(group);
}

using Names = std::set<std::string>;

Names names_in_group(const Value& group) {
  const Value* params = find_entry_of_kind(group, "params", Kind::list);
  if (params == nullptr)
    throw Error(ErrorCode::mismatch, "a group of parameters without a list of names");
  Names names;
  for (const Value& name : params->items()) {
    if (!name.is(Kind::string))
      throw Error(ErrorCode::mismatch, "a group's parameter is " + render(name, 60) + ", no name");
    names.insert(name.as_string());
  }
  return names;
}

std::vector<Names> names_of_all(const Value& groups) {
  std::vector<Names> all;
  for (const Value& group : groups.items()) all.push_back(names_in_group(group));
  return all;
}

bool is_live_key(const Value& key) {
  return std::ranges::any_of(kLiveKeys, [&](std::string_view text) { return is_text(key, text); });
}

// The stored settings for one live group.
Value fitted(const Value& stored, const Value& live) {
  Value made = Value::dict(stored.pairs());
  made.set_item("params", live.at("params"));
  // Without names of its own the live group cannot correct these: their order is that of params.
  if (stored.find("param_names") != nullptr) made.set_item("param_names", live.at("params"));
  for (const auto& [key, value] : live.pairs()) {
    if (is_live_key(key) || made.find_key(key) == nullptr) made.set_item(key, value);
  }
  return made;
}

// Says of a parameter that not both have in the group.
[[noreturn]] void refuse_names(const Names& stored, const Names& live, std::size_t group) {
  for (const std::string& name : live) {
    if (stored.contains(name)) continue;
    throw Error(ErrorCode::mismatch,
                "no group of the checkpoint with the others of this group has "
                "its parameter " +
                    printable(name, 200))
        .at_key(place_of(group) + ".params");
  }
  for (const std::string& name : stored) {
    if (live.contains(name)) continue;
    throw Error(ErrorCode::mismatch, "the checkpoint's group has the parameter " +
                                         printable(name, 200) + ", this one does not")
        .at_key(place_of(group) + ".params");
  }
  throw Error(ErrorCode::mismatch, "two groups of the same parameters").at_key(place_of(group));
}

// The stored group that has most of the names, to be compared with.
const Names& nearest(const std::vector<Names>& stored, const Names& live) {
  const auto common = [&](const Names& names) {
    return std::ranges::count_if(live, [&](const auto& name) { return names.contains(name); });
  };
  return *std::ranges::max_element(stored, {}, common);
}

// The number of the stored group with these names that no other live group has.
std::size_t take_group(const std::vector<Names>& stored, const Names& live, std::size_t group,
                       std::vector<bool>& taken) {
  for (std::size_t i = 0; i < stored.size(); ++i) {
    if (taken[i] || stored[i] != live) continue;
    taken[i] = true;
    return i;
  }
  refuse_names(nearest(stored, live), live, group);
}

bool is_zero(const Value* value) {
  return value != nullptr && is_one_of(value->kind(), Kind::real, Kind::integer) &&
         value->as_real() == 0.0;
}

// One group that became two, of which the second has no weight decay.
Value split_in_two(const Value& stored, const Value& live) {
  std::vector<Names> names = names_of_all(live);
  if (!is_zero(live.at(1).find("weight_decay"))) {
    throw Error(ErrorCode::mismatch,
                "the checkpoint has one group, this optimizer two, and the second one's "
                "weight_decay is not 0.0")
        .at_key(place_of(1) + ".weight_decay");
  }
  const Names both_of_stored = names_in_group(stored.at(std::size_t{0}));
  Names both = names[0];
  both.insert(names[1].begin(), names[1].end());
  if (both != both_of_stored) refuse_names(both_of_stored, both, 0);
  Value second = fitted(stored.at(std::size_t{0}), live.at(1));
  second.set_item("weight_decay", 0.0);
  return Value::list({fitted(stored.at(std::size_t{0}), live.at(std::size_t{0})), second});
}

}  // namespace

Value fit_groups(const Value& stored, const Value& live) {
  if (stored.size() == 1 && live.size() == 2) return split_in_two(stored, live);
  if (stored.size() != live.size()) {
    throw Error(ErrorCode::mismatch, "the checkpoint's optimizer has " +
                                         std::to_string(stored.size()) + " groups, this one " +
                                         std::to_string(live.size()))
        .at_key("optim.param_groups");
  }
  const std::vector<Names> names = names_of_all(stored);
  std::vector<bool> taken(names.size(), false);
  Value::List fit;
  for (std::size_t i = 0; i < live.size(); ++i) {
    const std::size_t at = take_group(names, names_in_group(live.at(i)), i, taken);
    fit.push_back(fitted(stored.at(at), live.at(i)));
  }
  return Value::list(std::move(fit));
}

}  // namespace tessera
