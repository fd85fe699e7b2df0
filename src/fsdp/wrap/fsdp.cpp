#include "tessera/fsdp.h"
#include "tessera/ddp.h"
#include "tessera/trace.h"

#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/log.h"
#include "fsdp/step/root.h"
#include "fsdp/unit/registry.h"
#include "fsdp/unit/whole_parameters.h"
#include "fsdp/wrap/past_holders.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using detail::Unit;
using detail::units_below;

ShardedParameter describe(const at::Tensor& tensor, const detail::ParamOwner& owner) {
  ShardedParameter parameter;
  parameter.shape = tensor.sizes().vec();
  if (!owner.unit) {
    parameter.local = tensor;
    return parameter;
  }
  const auto& unit = *owner.unit;
  parameter.local = unit.params()[owner.index].local;
  parameter.home = owner.unit;
  if (!unit.is_sharded()) return parameter;
  parameter.mesh = unit.mesh();
  parameter.sharded = true;
  parameter.flat = unit.geometry() != detail::Geometry::rows;
  parameter.dim = unit.layout().params[owner.index].dim;
  parameter.offset = unit.held_from(owner.index);
  parameter.placement = unit.placement_of(owner.index);
  if (unit.is_flat()) {
    parameter.shape = {unit.layout().gathered_elements};
    parameter.offset = parameter.mesh->rank() * unit.layout().shard_elements;
    parameter.placement.begin = 0;
  }
  return parameter;
}

FlatMember member_of(const std::string& name, const detail::ParamOwner& owner) {
  const auto& unit = *owner.unit;
  const auto held = unit.held(owner.index);
  const auto begin = unit.held_from(owner.index);
  return {name,
          unit.layout().params[owner.index].shape,
          {begin, begin + held.numel()},
          held.storage_offset() - unit.params()[owner.index].local.storage_offset(),
          unit.placement_of(owner.index)};
}

// The name of the flat parameter beside the first parameter in it.
std::string flat_name(const torch::nn::Module& module, const std::shared_ptr<Unit>& unit) {
  const auto units = units_below(module);
  const auto found = std::ranges::find(
      units, unit, [](const auto& named) -> const auto& { return named.second; });
  return detail::flat_param_name(found == units.end() ? "" : found->first);
}

// The tensors that an optimizer is given, each once, with the names of what is in them.
class ParameterList {
 public:
  explicit ParameterList(const torch::nn::Module& module) : module_(module) {}

  void add(const std::string& name, const at::Tensor& tensor) {
    const auto owner = detail::find_owner(tensor);
    const bool is_part = owner.unit && owner.unit->is_flat();
    const auto& key = is_part ? owner.unit->params()[owner.index].local : tensor;
    const auto [at, fresh] = known_.emplace(key.unsafeGetTensorImpl(), parameters_.size());
    if (fresh) parameters_.push_back(describe(tensor, owner));
    auto& parameter = parameters_[at->second];
    if (!is_part) {
      parameter.names.push_back(name);
      return;
    }
    if (fresh) parameter.names.push_back(flat_name(module_, owner.unit));
    if (seen_.insert(tensor.unsafeGetTensorImpl()).second)
      parameter.members.push_back(member_of(name, owner));
  }

  std::vector<ShardedParameter> take() { return std::move(parameters_); }

 private:
  const torch::nn::Module& module_;
  std::vector<ShardedParameter> parameters_;
  std::unordered_map<const c10::TensorImpl*, std::size_t> known_;
  std::unordered_set<const c10::TensorImpl*> seen_;
};

void shard_members(const std::vector<UnitMember>& members, const detail::UnitSpec& spec) {
  std::vector<detail::UnitModule> modules;
  for (const auto& member : members) modules.push_back(member.module());
  detail::shard_modules(std::move(modules), spec);
}

detail::UnitSpec sharded_spec(const HybridMesh& mesh, const ShardOptions& options) {
  detail::UnitSpec spec{mesh.all, mesh.shard, mesh.replicate, options, {}};
  if (options.layout == ShardLayout::flat) spec.geometry = detail::Geometry::flat_original;
  return spec;
}

detail::UnitSpec sharded_spec(const Mesh& mesh, const ShardOptions& options) {
  auto spec = sharded_spec(HybridMesh{mesh, mesh, mesh}, options);
  spec.replicate.reset();
  return spec;
}

}  // namespace

void fully_shard(const UnitMember& module, const Mesh& mesh, const ShardOptions& options) {
  shard_members({module}, sharded_spec(mesh, options));
}

void fully_shard(const UnitMember& module, const HybridMesh& mesh, const ShardOptions& options) {
  shard_members({module}, sharded_spec(mesh, options));
}

void replicate(const UnitMember& module, const Mesh& mesh, const ReplicateOptions& options) {
  shard_members({module}, {mesh, std::nullopt, mesh, {}, options});
}

void fully_shard(const std::vector<UnitMember>& modules, const Mesh& mesh,
                 const ShardOptions& options) {
  shard_members(modules, sharded_spec(mesh, options));
}

void fully_shard(const std::vector<UnitMember>& modules, const HybridMesh& mesh,
                 const ShardOptions& options) {
  shard_members(modules, sharded_spec(mesh, options));
}

std::vector<ShardedParameter> sharded_parameters(ModuleRef module_ref) {
  const auto& module = module_ref.get();
  detail::refresh_units(module, detail::GradReducer::Look::now);
  detail::warn_of_forgotten(module);
  ParameterList list(module);
  for (const auto& entry : module.named_parameters()) {
    if (entry.value().defined()) list.add(entry.key(), entry.value());
  }
  return list.take();
}

void set_requires_gradient_sync(ModuleRef module, bool sync, bool recurse) {
  for (const auto& [name, unit] : units_below(module.get())) {
    if (recurse || name.empty()) entry_of(*unit).sync_gradients = sync;
  }
}

bool detail::begins_step(ModuleRef module) {
  auto& entry = entry_of(*find_unit(&module.get()));
  return std::exchange(entry.begins_step, entry.sync_gradients);
}

NoSync::NoSync(ModuleRef module) {
  const auto units = units_below(module.get());
  for (const auto& [name, unit] : units) {
    if (!unit->schedule().is_quiet())
      throw Error(ErrorCode::invalid_argument, "no_sync was asked for in a forward or backward");
  }
  for (const auto& [name, unit] : units) {
    before_.emplace_back(unit, std::exchange(entry_of(*unit).sync_gradients, false));
  }
}

NoSync::~NoSync() {
  for (const auto& [weak, sync] : before_) {
    const auto unit = weak.lock();
    if (!unit) continue;
    if (entry_of(*unit).sync_gradients) {
      log_of_all(LogLevel::warning, "gradient synchronisation of unit '" + unit->name() +
                                        "' was switched on within no_sync");
    }
    entry_of(*unit).sync_gradients = sync;
  }
}

void sync_module_states(ModuleRef module_ref, const Mesh& mesh) {
  const auto& module = module_ref.get();
  std::vector<at::Tensor> states;
  for (const auto& parameter : module.parameters()) {
    if (!parameter.defined()) continue;
    if (detail::find_owner(parameter).unit) {
      throw Error(ErrorCode::invalid_argument,
                  "sync_module_states has to come before the module is sharded");
    }
    states.push_back(parameter);
  }
  const auto buffers = module.buffers();
  states.insert(states.end(), buffers.begin(), buffers.end());
  detail::broadcast_from_first(std::move(states), mesh);
}

void sync_buffers(ModuleRef module, const Mesh& mesh) {
  detail::broadcast_from_first(module.get().buffers(), mesh);
}

void abandon_step(ModuleRef module) {
  for (const auto& [name, unit] : units_below(module.get())) {
    unit->require_own_mesh();
    if (entry_of(*unit).root) entry_of(*unit).root->abandon_step();
  }
}

void unshard(ModuleRef module) {
  for (const auto& [name, unit] : units_below(module.get())) {
    // What is gathered may be older than the shards, and no pass has looked at these since.
    unit->free();
    unit->start_gather(/*may_change=*/true);
    unit->gather();
    unit->changes().remember();
    entry_of(*unit).pinned = true;
  }
}

void reshard(ModuleRef module) {
  for (const auto& [name, unit] : units_below(module.get())) {
    unit->require_own_mesh();
    entry_of(*unit).pinned = false;
    unit->free();
  }
}

std::vector<UnitReport> unit_reports(ModuleRef module) {
  std::vector<UnitReport> reports;
  for (const auto& [name, unit] : units_below(module.get())) {
    reports.push_back({name, unit->element_count(), unit->shard_bytes(), unit->gathered_bytes(),
                       unit->gathers, unit->reductions});
  }
  return reports;
}

}  // namespace tessera
