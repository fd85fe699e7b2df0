#include "optim_state/optim_model.h"

#include <utility>

#include "base/log.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"

namespace tessera::detail {

OptimModel::OptimModel(const torch::nn::Module& module) {
  UnitNames unit_names;
  for (const auto& [name, unit] : units_below(module)) {
    unit_names.emplace(unit.get(), name);
    if (!all_ranks_) all_ranks_ = unit->all_ranks();
  }
  std::unordered_map<const c10::TensorImpl*, std::string> seen;
  for (const auto& entry : module.named_parameters()) {
    const auto& tensor = entry.value();
    if (!tensor.defined()) continue;
    const auto [first, is_new] = seen.emplace(tensor.unsafeGetTensorImpl(), entry.key());
    aliases_.emplace(entry.key(), first->second);
    if (is_new) add(entry.key(), tensor, unit_names);
  }
}

void OptimModel::add(const std::string& name, const at::Tensor& tensor,
                     const UnitNames& unit_names) {
  const auto owner = find_owner(tensor);
  const auto& held = owner.unit ? owner.unit->params()[owner.index].local : tensor;
  const auto [at, is_first] = by_tensor_.emplace(held.unsafeGetTensorImpl(), params_.size());
  if (is_first) params_.push_back({held, name, {}, {}, owner.unit, {}});
  auto& param = params_[at->second];
  param.names.push_back(name);
  param.shapes.push_back(tensor.sizes().vec());
  param.places.push_back(owner.index);
  if (!is_first || !param.is_flat()) return;
  has_flat_ = true;
  param.own_name = flat_name(unit_names, *owner.unit);
}

std::string OptimModel::flat_name(const UnitNames& unit_names, const Unit& unit) {
  const auto name = unit_names.find(&unit);
  return flat_param_name(name == unit_names.end() ? "" : name->second);
}

const ModelParam* OptimModel::find(const at::Tensor& tensor) const {
  const auto found = by_tensor_.find(tensor.unsafeGetTensorImpl());
  return found == by_tensor_.end() ? nullptr : &params_[found->second];
}

std::string OptimModel::first_name(const std::string& name) const {
  const auto found = aliases_.find(name);
  return found == aliases_.end() ? "" : found->second;
}

std::string OptimModel::first_name(const Value& key) const {
  return key.is(Value::Kind::string) ? first_name(key.as_string()) : "";
}

std::shared_ptr<const OptimizerRef::Names> OptimModel::own_names() const {
  auto names = std::make_shared<OptimizerRef::Names>();
  for (const auto& param : params_)
    names->emplace(param.tensor.unsafeGetTensorImpl(), param.own_name);
  return names;
}

GroupOf::GroupOf(const std::optional<Mesh>& asked, const OptimModel& model)
    : mesh_(asked ? asked : model.all_ranks()) {
  if (!mesh_) solo_ = solo_group();
  group_ = mesh_ ? &mesh_->group() : solo_.get();
}

namespace {

const ModelParam* require_known(const OptimModel& model, const at::Tensor& tensor) {
  if (const auto* param = model.find(tensor)) return param;
  throw Error(ErrorCode::invalid_argument,
              "the optimizer has a parameter that is not one of the model's: it was made before "
              "the model was sharded, or from module->parameters() instead of "
              "sharded_parameters(model)");
}

std::vector<OptimKey> keys_of_input(const OptimModel& model, const OptimInput& optim_input) {
  log_of_all(
      LogLevel::warning,
      "The `optim_input` argument is deprecated and will be removed after PyTorch 1.13. You may "
      "remove it from your code without changing its functionality.");
  std::vector<OptimKey> keys;
  std::int64_t number = 0;
  for (const auto& group : optim_input) {
    for (const auto& tensor : group) keys.push_back({number++, require_known(model, tensor)});
  }
  if (keys.empty()) throw Error(ErrorCode::invalid_argument, "Optimizer input should not be empty");
  return keys;
}

}  // namespace

std::vector<OptimKey> keys_of(const OptimModel& model, const std::optional<OptimizerRef>& optim,
                              const std::optional<OptimInput>& optim_input) {
  if (optim_input) return keys_of_input(model, *optim_input);
  std::vector<OptimKey> keys;
  if (!optim) {
    std::int64_t number = 0;
    for (const auto& param : model.params()) keys.push_back({number++, &param});
    return keys;
  }
  for (const auto& group : optim->keys()) {
    for (const auto& [key, tensor] : group) keys.push_back({key, require_known(model, tensor)});
  }
  return keys;
}

std::vector<ParamGroup> params_by_group(const OptimModel& model, const OptimizerRef& optim) {
  std::vector<ParamGroup> groups;
  for (const auto& tensors : optim.access().parameters()) {
    auto& group = groups.emplace_back();
    for (const auto& tensor : tensors) group.push_back(require_known(model, tensor));
  }
  return groups;
}

std::vector<std::string> names_of(const ParamGroup& group) {
  std::vector<std::string> names;
  for (const auto* param : group)
    names.insert(names.end(), param->names.begin(), param->names.end());
  return names;
}

}  // namespace tessera::detail
