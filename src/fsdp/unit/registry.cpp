#include "fsdp/unit/registry.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "torch/mesh_state.h"

namespace tessera::detail {
namespace {

struct Owner {
  std::weak_ptr<Unit> unit;
  std::size_t index = 0;
};

struct Tables {
  std::shared_mutex mutex;
  std::atomic<std::size_t> count{0};  // of modules: calls in programs without units cost one load
  std::unordered_map<const torch::nn::Module*, std::weak_ptr<Unit>> modules;
  std::unordered_map<const c10::TensorImpl*, Owner> parameters;
};

Tables& tables() {
  static Tables instance;
  return instance;
}

}  // namespace

std::shared_ptr<Unit> find_unit(const torch::nn::Module* module) {
  auto& all = tables();
  if (all.count.load(std::memory_order_acquire) == 0) return nullptr;
  const std::shared_lock lock(all.mutex);
  const auto found = all.modules.find(module);
  if (found == all.modules.end()) return nullptr;
  auto unit = found->second.lock();
  // Another module may live where one that was a unit has died.
  return unit && unit->has_module(module) ? unit : nullptr;
}

ParamOwner find_owner(const at::Tensor& parameter) {
  auto& all = tables();
  const std::shared_lock lock(all.mutex);
  const auto found = all.parameters.find(parameter.unsafeGetTensorImpl());
  if (found == all.parameters.end()) return {};
  // A living unit holds its parameters, so no other tensor can have their address.
  return {found->second.unit.lock(), found->second.index};
}

std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units_below(
    const torch::nn::Module& module) {
  std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units;
  const auto add = [&](const std::string& name, const torch::nn::Module* below) {
    auto unit = find_unit(below);
    const bool is_known =
        std::ranges::any_of(units, [&](const auto& known) { return known.second == unit; });
    if (unit && !is_known) units.emplace_back(name, std::move(unit));
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

UnitsOf::UnitsOf(const torch::nn::Module& module) {
  for (const auto& [name, unit] : units_below(module)) units_.push_back(unit);
}

UnitsOf::~UnitsOf() {
  for (const auto& weak : units_) {
    const auto unit = weak.lock();
    if (!unit || !unit->is_dead()) continue;
    const auto mesh = unit->all_ranks();
    forget_dead_units(*state_of(mesh));
  }
}

void refresh_units(const torch::nn::Module& module, GradReducer::Look how) {
  for (const auto& [name, unit] : units_below(module)) {
    unit->look_at_reductions(how);
    unit->refresh();
  }
}

void register_unit(const std::shared_ptr<Unit>& unit, const Mesh& mesh) {
  forget_dead_units(*state_of(mesh));
  state_of(mesh)->units.push_back(unit);
  auto& all = tables();
  const std::unique_lock lock(all.mutex);
  // Other threads' units are here too: whoever held one for a moment, to ask it, could be the last
  // that holds it, and would end its mesh. Units of dead modules are passed over where one looks.
  std::erase_if(all.modules, [](const auto& entry) { return entry.second.expired(); });
  std::erase_if(all.parameters, [](const auto& entry) { return entry.second.unit.expired(); });
  for (const auto& module : unit->modules()) all.modules[module.get()] = unit;
  for (std::size_t i = 0; i < unit->params().size(); ++i) {
    all.parameters[unit->params()[i].full.unsafeGetTensorImpl()] = {unit, i};
  }
  all.count.store(all.modules.size(), std::memory_order_release);
}

}  // namespace tessera::detail
