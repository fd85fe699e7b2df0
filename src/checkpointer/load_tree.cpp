#include "checkpointer/load_tree.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <torch/torch.h>

#include "format/olmo/keys.h"
#include "format/sharded/sharded.h"
#include "fsdp/state/model_state.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/leaf.h"
#include "torch/tensor.h"

namespace tessera::detail {
namespace {

constexpr const char* kModel = "model";
constexpr const char* kOptim = "optim";
constexpr const char* kGroups = "param_groups";
constexpr const char* kParamNames = "param_names";

bool is_below(const Leaf& leaf, const char* part) {
  return leaf.path.size() > 1 && leaf.path[0] == PathPart(std::string(part));
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

bool is_list_of_text(const Leaf* leaf) {
  return leaf != nullptr && leaf->value.is(Value::Kind::list) &&
         std::ranges::all_of(leaf->value.items(),
                             [](const Value& item) { return item.is(Value::Kind::string); });
}

}  // namespace

Value::List stored_orders(const Checkpoint& contents) {
  Value::List orders;
  for (std::size_t g = 0;; ++g) {
    const auto group = std::string(kOptim) + "." + kGroups + "." + std::to_string(g) + ".";
    const auto* params = contents.find(group + "params");
    if (params == nullptr) return orders;
    const auto* names = is_list_of_text(params) ? params : contents.find(group + kParamNames);
    if (!is_list_of_text(names)) continue;
    Value::List clean;
    for (const auto& name : names->value.items())
      clean.emplace_back(sharded::clean_name(name.as_string()));
    orders.push_back(Value::list(std::move(clean)));
  }
}

LoadTree::LoadTree(ModuleRef model, std::optional<OptimizerRef> optim)
    : model_(model_state(model)) {
  if (optim) leaves_.emplace(model, std::move(*optim));
}

LiveNames LoadTree::names() {
  return live_names(model_, leaves_);
}

void LoadTree::prepare(const Checkpoint& contents) {
  add_model(contents);
  if (leaves_) prepare_optimizer(contents);
}

// A parameter that modules share is there under one name at least.
void LoadTree::add_model(const Checkpoint& contents) {
  auto theirs = names_below(contents, kModel);
  std::set<const void*> found;
  std::set<std::string> missing;
  std::vector<Value::Pair> pairs;
  for (const auto& [key, value] : model_.pairs()) {
    if (theirs.erase("model." + key.as_string()) == 0) continue;
    found.insert(value.identity());
    pairs.emplace_back(key, value);
  }
  for (const auto& [key, value] : model_.pairs()) {
    if (!found.contains(value.identity())) missing.insert("model." + key.as_string());
  }
  if (!missing.empty()) throw other_model("it lacks", missing);
  if (!theirs.empty()) throw other_model("this one lacks", theirs);
  tree_.set_item(kModel, Value::dict(std::move(pairs), DictKind::ordered_dict));
}

void LoadTree::prepare_optimizer(const Checkpoint& contents) {
  const auto stored = stored_part(contents, {kOptim});
  leaves_->prepare(stored);
  tree_.set_item(kOptim, leaves_->tree_like(stored));
}

Value::List LoadTree::finish() {
  return leaves_ ? leaves_->finish(tree_.at(kOptim)) : Value::List();
}

void LoadTree::undo() {
  if (leaves_) leaves_->undo();
}

namespace {

Value value_of(const Value& tensor, bool is_pickled) {
  if (!is_pickled) return tensor;
  const auto bytes = plain(tensor_of(tensor.as_tensor())).contiguous();
  return olmo::decode_value(
      {static_cast<const std::byte*>(bytes.const_data_ptr()), bytes.nbytes()});
}

}  // namespace

Value nested(const Value& flat) {
  auto root = Value::dict();
  for (const auto& [key, tensor] : flat.pairs()) {
    const auto& name = key.as_string();
    const auto decoded = olmo::decode_key(name);
    try {
      if (decoded) {
        olmo::put_at(root, decoded->keys, value_of(tensor, decoded->pickled));
      } else {
        olmo::put_at(root, {key}, tensor);
      }
    } catch (Error& error) {
      throw error.at_key(name);
    }
  }
  return root;
}

}  // namespace tessera::detail
