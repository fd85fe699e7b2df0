#include "optim_state/model_by_name.h"

#include <torch/torch.h>

#include <algorithm>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "fsdp/state/model_state.h"
#include "fsdp/state/sharded_load.h"
#include "fsdp/unit/registry.h"
#include "optim_state/chunks.h"
#include "optim_state/optim_by_name.h"
#include "optim_state/state_message.h"
#include "optim_state/tree.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"
#include "value/render.h"

namespace tessera::detail {
namespace {

constexpr const char* kSettingModel = "setting the state of a model by name";
// The bytes of the tensors that travel at once from rank 0.
constexpr std::int64_t kBatchBytes = 64 << 20;

using Pairs = std::vector<Value::Pair>;

bool shards_anything(const torch::nn::Module& module) {
  return std::ranges::any_of(units_below(module),
                             [](const auto& named) { return named.second->is_sharded(); });
}

// The sharded kind is the model's own memory if nothing is sharded.
Value state_of(ModuleRef model, const DistributedStateDictOptions& options) {
  if (!options.full_state_dict && !shards_anything(model.get())) return model_state(model);
  const auto type = options.full_state_dict ? StateDictType::full : StateDictType::sharded;
  const StateDictTypeScope scope(model,
                                 {.type = type,
                                  .offload_to_cpu = options.cpu_offload,
                                  .rank0_only = options.full_state_dict && options.cpu_offload});
  return state_dict(model);
}

std::unordered_set<std::string> frozen_names(const torch::nn::Module& module) {
  std::unordered_set<std::string> names;
  for (const auto& entry : module.named_parameters()) {
    if (entry.value().defined() && !entry.value().requires_grad()) names.insert(entry.key());
  }
  return names;
}

// The prefix of the names in `module`; empty for the model itself.
std::string prefix_of(const torch::nn::Module& model, const torch::nn::Module* module) {
  if (module == &model) return "";
  for (const auto& below : model.named_modules("", /*include_self=*/false)) {
    if (below.value().get() == module) return below.key() + ".";
  }
  throw Error(ErrorCode::invalid_argument, "one of `submodules` is not below the model");
}

Value only_submodules(const torch::nn::Module& model, const Value& state,
                      const DistributedStateDictOptions& options) {
  Pairs pairs;
  std::unordered_set<std::string> seen;
  for (const auto& module : options.submodules) {
    const auto prefix = prefix_of(model, module.get());
    for (const auto& [key, value] : state.pairs()) {
      const auto& name = key.as_string();
      if (!name.starts_with(prefix)) continue;
      auto own = options.keep_submodule_prefixes ? name : name.substr(prefix.size());
      if (seen.insert(own).second) {
        pairs.emplace_back(std::move(own), value);
      } else if (!options.keep_submodule_prefixes) {
        throw Error(ErrorCode::conflict,
                    "two of `submodules` have this name, if theirs are not kept")
            .at_key(own);
      }
    }
  }
  return Value::dict(std::move(pairs), state.dict_kind());
}

Value without_names(const Value& state, const std::unordered_set<std::string>& names) {
  Pairs pairs;
  std::ranges::copy_if(state.pairs(), std::back_inserter(pairs),
                       [&](const auto& pair) { return !names.contains(pair.first.as_string()); });
  return Value::dict(std::move(pairs), state.dict_kind());
}

// A tensor that is in the memory of a device, copied from there.
Value on_host(const Tensor& tensor) {
  auto copy = tensor;
  for (auto& piece : copy.pieces) {
    if (!piece.storage || !piece.storage->device) continue;
    piece = piece_in(piece, tensor_of_piece(tensor, piece).contiguous().cpu());
  }
  return copy;
}

std::string listed(const std::vector<std::string>& names) {
  constexpr std::size_t kNamed = 100;
  if (names.size() <= kNamed) return joined(names);
  return joined({names.begin(), names.begin() + kNamed}) + " and " +
         std::to_string(names.size() - kNamed) + " more";
}

void require_same_names(const IncompatibleKeys& keys) {
  if (keys.missing_keys.empty() && keys.unexpected_keys.empty()) return;
  std::string text;
  if (!keys.missing_keys.empty()) text = "the state lacks " + listed(keys.missing_keys);
  if (!keys.unexpected_keys.empty()) {
    text +=
        (text.empty() ? "" : "; ") + std::string("the model lacks ") + listed(keys.unexpected_keys);
  }
  const auto& first = keys.missing_keys.empty() ? keys.unexpected_keys : keys.missing_keys;
  throw Error(ErrorCode::mismatch, text).at_key(first.front());
}

const std::string& require_name(const Value& key) {
  if (!key.is(Value::Kind::string)) {
    throw Error(ErrorCode::invalid_argument,
                "the state of a model has names as keys, not " + std::string(describe(key.kind())));
  }
  const auto& name = key.as_string();
  if (name.find("_flat_param") == std::string::npos) return name;
  throw Error(ErrorCode::invalid_argument,
              "a flat parameter, which only ranks of the same kind can load; get the state by "
              "get_model_state_dict")
      .at_key(name);
}

Value list_of(const std::vector<std::string>& names) {
  return Value::list(Value::List(names.begin(), names.end()));
}

}  // namespace

Value model_by_name(ModuleRef model, const DistributedStateDictOptions& options) {
  const torch::NoGradGuard no_grad;
  auto state = state_of(model, options);
  if (!options.submodules.empty()) state = only_submodules(model.get(), state, options);
  if (options.ignore_frozen_params) state = without_names(state, frozen_names(model.get()));
  if (!options.cpu_offload) return state;
  const OptimModel params(model.get());
  const GroupOf group(options.group, params);
  if (options.full_state_dict && group.get().rank() != 0) return Value::dict();
  return map_tensors(state, on_host);
}

ModelSetter::ModelSetter(ModuleRef model, const Value& state, bool may_be_empty,
                         const DistributedStateDictOptions& options)
    : module_(model.get()),
      options_(options),
      model_(model.get()),
      group_(options.group, model_),
      entries_(state_entries(model.get())) {
  refresh_units(module_);
  if (is_first_ranks(options)) {
    plan_of_first(state, may_be_empty);
  } else {
    plan_own(state, may_be_empty);
  }
}

// The description first, so that what is wrong with it is every rank's to say.
void ModelSetter::plan_of_first(const Value& state, bool may_be_empty) {
  const auto description = first_tree(group_.get(), kSettingModel, [&] {
    (void)state.pairs();
    return Value::dict(state.pairs());
  });
  agree(group_.get(), kSettingModel, [&] { plan(description, may_be_empty); });
  if (group_.get().rank() != 0) return;
  for (const auto& [key, value] : state.pairs()) {
    if (const auto given = given_.find(key.as_string()); given != given_.end())
      given->second = value;
  }
}

void ModelSetter::plan_own(const Value& state, bool may_be_empty) {
  const auto missing = all_trees(group_.get(), kSettingModel, [&] {
    plan(state, may_be_empty);
    return list_of(keys_.missing_keys);
  });
  for (const auto& other : missing) {
    if (!(other == missing.front()))
      throw Error(ErrorCode::mismatch, "ranks set states that have different names");
  }
}

void ModelSetter::plan(const Value& state, bool may_be_empty) {
  is_empty_ = state.size() == 0;
  if (is_empty_ && options_.strict && !may_be_empty)
    throw Error(ErrorCode::invalid_argument, "the state of the model is empty");
  compare_names(state);
  if (is_empty_) return;
  if (options_.strict) require_same_names(keys_);
  if (!options_.full_state_dict) {
    parts_.emplace(module_, Value::dict(state.pairs()), Names::partial);
    return;
  }
  for (const auto& entry : entries_) {
    if (const auto given = given_.find(entry.name); given != given_.end())
      plan_whole(entry, given->second);
  }
}

void ModelSetter::compare_names(const Value& state) {
  for (const auto& [key, value] : state.pairs()) given_.emplace(require_name(key), value);
  std::unordered_set<std::string> known;
  for (const auto& entry : entries_) {
    known.insert(entry.name);
    if (!given_.contains(entry.name)) keys_.missing_keys.push_back(entry.name);
  }
  for (const auto& [key, value] : state.pairs()) {
    if (!known.contains(key.as_string())) keys_.unexpected_keys.push_back(key.as_string());
  }
}

void ModelSetter::plan_whole(const StateEntry& entry, const Value& given) const {
  require_shape(entry.name, entry.tensor.sizes().vec(), given);
  require_quiet(entry.tensor);
  if (!given.as_tensor().sharded) return;
  throw Error(ErrorCode::mismatch,
              "a part of a tensor where the whole is expected: the state is a sharded one")
      .at_key(entry.name);
}

IncompatibleKeys ModelSetter::apply() {
  const torch::NoGradGuard no_grad;
  if (is_empty_) return {};
  if (parts_) {
    parts_->apply();
  } else if (is_first_ranks(options_)) {
    set_from_first();
  } else {
    set_whole();
  }
  return std::move(keys_);
}

void ModelSetter::set_whole() const {
  for (const auto& [name, tensor] : entries_) {
    if (const auto given = given_.find(name); given != given_.end())
      set_entry(tensor, tensor_of(given->second.as_tensor()));
  }
}

void ModelSetter::set_from_first() const {
  const bool is_first = group_.get().rank() == 0;
  std::vector<at::Tensor> to, values;
  std::int64_t bytes = 0;
  const auto send = [&] {
    if (group_.mesh()) broadcast_over(*group_.mesh(), values);
    for (std::size_t i = 0; i < to.size(); ++i) set_entry(to[i], values[i]);
    to.clear();
    values.clear();
    bytes = 0;
  };
  for (const auto& [name, tensor] : entries_) {
    const auto given = given_.find(name);
    if (given == given_.end()) continue;
    const auto& leaf = given->second.as_tensor();
    to.push_back(tensor);
    values.push_back(is_first ? tensor_of(leaf).cpu().contiguous()
                              : torch::empty(leaf.shape, scalar_type_of(leaf.dtype)));
    bytes += static_cast<std::int64_t>(byte_size(leaf.dtype, leaf.shape));
    if (bytes >= kBatchBytes) send();
  }
  send();
}

}  // namespace tessera::detail
