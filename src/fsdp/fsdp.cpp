#include "tessera/fsdp.h"

#include <functional>
#include <unordered_map>
#include <utility>

#include "fsdp/registry.h"
#include "fsdp/root.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::Unit;

// The units at and below `module` with their names, each once, in module order.
std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units_below(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units;
  const auto add = [&](const std::string& name, const torch::nn::Module* below) {
    auto unit = detail::find_unit(below);
    if (!unit) return;
    for (const auto& known : units) {
      if (known.second == unit) return;
    }
    units.emplace_back(name, std::move(unit));
  };
  // named_modules() would want to own the module itself.
  add("", &module);
  const std::function<void(const torch::nn::Module&, const std::string&)> descend =
      [&](const torch::nn::Module& at, const std::string& prefix) {
        for (const auto& child : at.named_children()) {
          add(prefix + child.key(), child.value().get());
          descend(*child.value(), prefix + child.key() + ".");
        }
      };
  descend(module, "");
  return units;
}

ShardedParameter describe(const at::Tensor& tensor) {
  ShardedParameter parameter;
  parameter.shape = tensor.sizes().vec();
  const auto owner = detail::find_owner(tensor);
  if (!owner.unit) {
    parameter.local = tensor;
    return parameter;
  }
  auto& param = owner.unit->params()[owner.index];
  if (param.local.requires_grad() != tensor.requires_grad()) {
    param.local.set_requires_grad(tensor.requires_grad());
  }
  parameter.local = param.local;
  parameter.mesh = owner.unit->mesh();
  parameter.offset = param.place.first_row(parameter.mesh->rank());
  parameter.sharded = true;
  return parameter;
}

}  // namespace

std::vector<ShardedParameter> sharded_parameters(const torch::nn::Module& module) {
  std::vector<ShardedParameter> parameters;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known;
  for (const auto& entry : module.named_parameters()) {
    if (!entry.value().defined()) continue;
    const auto [at, fresh] = known.emplace(entry.value().unsafeGetTensorImpl(), parameters.size());
    if (fresh) parameters.push_back(describe(entry.value()));
    parameters[at->second].names.push_back(entry.key());
  }
  return parameters;
}

void set_requires_gradient_sync(const torch::nn::Module& module, bool sync) {
  for (const auto& [name, unit] : units_below(module)) unit->sync_gradients = sync;
}

void reset(const torch::nn::Module& module) {
  for (const auto& [name, unit] : units_below(module)) {
    if (unit->root) unit->root->reset();
  }
}

void unshard(const torch::nn::Module& module) {
  for (const auto& [name, unit] : units_below(module)) {
    unit->free();  // what is gathered may be older than the shards
    unit->gather();
    unit->pinned = true;
  }
}

void reshard(const torch::nn::Module& module) {
  for (const auto& [name, unit] : units_below(module)) {
    unit->pinned = false;
    unit->free();
  }
}

std::vector<UnitReport> unit_reports(const torch::nn::Module& module) {
  std::vector<UnitReport> reports;
  for (const auto& [name, unit] : units_below(module)) {
    reports.push_back({name, unit->element_count(), unit->shard_bytes(), unit->gathered_bytes(),
                       unit->gathers, unit->reductions});
  }
  return reports;
}

}  // namespace tessera
