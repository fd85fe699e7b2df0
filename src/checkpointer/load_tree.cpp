#include "checkpointer/load_tree.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/one_of.h"
#include "fsdp/state/model_state.h"
#include "tessera/error.h"
#include "tessera/leaf.h"

namespace tessera::detail {
namespace {

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kGroups = "param_groups";

bool is_below(const Leaf& leaf, const char* part) {
  return leaf.path.size() > 1 && leaf.path[0] == PathPart(std::string(part));
}

// What the checkpoint has below `part`, as a tree.
Value part_of(const Checkpoint& checkpoint, const char* part) {
  std::vector<Leaf> below;
  for (const auto& leaf : checkpoint.leaves) {
    if (!is_below(leaf, part)) continue;
    auto& one = below.emplace_back(leaf);
    one.path.erase(one.path.begin());
    one.name = dotted(one.path);
    one.containers = nullptr;
  }
  return unflatten(below);
}

std::set<std::string> names_below(const Checkpoint& checkpoint, const char* part) {
  std::set<std::string> names;
  for (const auto& leaf : checkpoint.leaves) {
    if (is_below(leaf, part)) names.insert(leaf.name);
  }
  return names;
}

Error other_model(const std::string& what, const std::set<std::string>& names) {
  return Error(ErrorCode::mismatch, "the checkpoint is of another model: " + what + " " +
                                        std::to_string(names.size()) + " names, the first is this")
      .at_key(*names.begin());
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

}  // namespace

LoadTree::LoadTree(const Checkpoint& contents, ModuleRef model, std::optional<OptimizerRef> optim)
    : optimizer_(std::move(optim)) {
  add_model(contents, model);
  if (optimizer_) add_optimizer(contents, model, *optimizer_);
  note_keys();
}

// A parameter that modules share is there under one name at least.
void LoadTree::add_model(const Checkpoint& contents, ModuleRef model) {
  auto theirs = names_below(contents, kModel);
  const auto state = model_state(model);
  std::set<const void*> found;
  std::set<std::string> missing;
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : state.pairs()) {
    if (theirs.erase("model." + key.as_string()) == 0) continue;
    found.insert(value.identity());
    pairs.emplace_back(key, value);
  }
  for (const auto& [key, value] : state.pairs()) {
    if (!found.contains(value.identity())) missing.insert("model." + key.as_string());
  }
  if (!missing.empty()) throw other_model("it lacks", missing);
  if (!theirs.empty()) throw other_model("this one lacks", theirs);
  tree_.set_item(kModel, Value::dict(std::move(pairs), DictKind::ordered_dict));
}

void LoadTree::add_optimizer(const Checkpoint& contents, ModuleRef model,
                             const OptimizerRef& optim) {
  leaves_.emplace(model, optim);
  match_ = match_optim(part_of(contents, kOptim), leaves_->tree());
  try {
    leaves_->prepare(match_.stored);
  } catch (...) {
    leaves_->undo();
    throw;
  }
  Value::List groups;
  for (const auto& group : match_.stored.at(kGroups).items()) groups.push_back(unknown_like(group));
  tree_.set_item(kOptim, Value::dict({{"state", leaves_->tree().at("state")},
                                      {kGroups, Value::list(std::move(groups))}}));
}

void LoadTree::note_keys() {
  for (const auto& leaf : flatten(tree_)) {
    if (!is_below(leaf, kOptim) || leaf.path.size() < 3) continue;
    auto path = leaf.path;
    if (path[1] == PathPart(std::string(kGroups))) {
      const auto group = static_cast<std::size_t>(std::get<std::int64_t>(path[2]));
      path[2] = static_cast<std::int64_t>(match_.groups[group]);
    } else {
      path[2] = match_.keys.at(std::get<std::string>(path[2]));
    }
    keys_->emplace(leaf.name, dotted(path));
  }
}

std::function<std::string(const std::string&)> LoadTree::rename() const {
  return [keys = keys_](const std::string& key) {
    const auto found = keys->find(key);
    return found == keys->end() ? key : found->second;
  };
}

Value::List LoadTree::finish() {
  if (!leaves_) return {};
  const auto& loaded = tree_.at(kOptim);
  Value::List known, others;
  for (std::size_t g = 0; g < match_.groups.size(); ++g) {
    auto group = loaded.at(kGroups).items().at(g);
    if (match_.is_split && g == 1) group.set_item("weight_decay", 0.0);
    const auto own = optimizer_->access().group(g);
    known.push_back(entries(group, own, true));
    auto& rest = others.emplace_back(entries(group, own, false));
    rest.erase("param_names");
    rest.set_item("params", match_.orders[g]);
  }
  leaves_->finish(
      Value::dict({{"state", loaded.at("state")}, {kGroups, Value::list(std::move(known))}}));
  return others;
}

void LoadTree::undo() {
  if (leaves_) leaves_->undo();
}

}  // namespace tessera::detail
