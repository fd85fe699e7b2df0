// What FullyShardedDataParallel does with its units after they are made.
#include <string>
#include <unordered_set>
#include <utility>

#include "fsdp/step/root.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace tessera::detail {

bool is_root(const torch::nn::Module& module) {
  const auto unit = find_unit(&module);
  if (!unit) throw Error(ErrorCode::invalid_argument, "the module is no unit any more");
  if (!entry_of(*unit).root) Root::make(*unit);
  return entry_of(*unit).root->units().front() == unit;
}

void require_root(const torch::nn::Module& module, const std::string& otherwise) {
  if (!is_root(module)) throw Error(ErrorCode::invalid_argument, otherwise);
  if (!find_unit(&module)->schedule().is_quiet()) {
    throw Error(ErrorCode::invalid_argument,
                "call it between steps: the model is in a forward or a backward");
  }
}

namespace {

using Units = std::vector<std::pair<std::string, std::shared_ptr<Unit>>>;

void require_not_hybrid(const Units& units) {
  for (const auto& [name, unit] : units) {
    if (unit->is_hybrid()) {
      throw Error(ErrorCode::invalid_argument,
                  "communication hooks are not supported for hybrid strategies")
          .at_key(name);
    }
  }
}

}  // namespace

void register_comm_hook(const torch::nn::Module& module, const CommHook& hook) {
  require_root(module, "register_comm_hook can only be called on a root instance.");
  if (!hook) throw Error(ErrorCode::invalid_argument, "a communication hook must be callable");
  const auto units = units_below(module);
  require_not_hybrid(units);
  for (const auto& [name, unit] : units) unit->set_comm_hook(hook);
}

}  // namespace tessera::detail

namespace tessera {
namespace {

using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

// Parameters that `replicate` left whole are no unit of FSDP's.
bool is_replicated(const torch::nn::Module& module) {
  const auto unit = detail::find_unit(&module);
  return unit && !unit->is_sharded() && !unit->is_fsdp1();
}

void append_units(const torch::nn::Module& parent,
                  std::unordered_set<const torch::nn::Module*>& seen, Modules& into) {
  for (const auto& module : parent.children()) {
    if (!seen.insert(module.get()).second || is_replicated(*module)) continue;
    if (detail::find_unit(module.get())) into.push_back(module);
    append_units(*module, seen, into);
  }
}

void append_if_unit(const torch::nn::Module& module, Modules& into) {
  const auto unit = detail::find_unit(&module);
  if (!unit) return;
  for (auto& own : unit->modules()) {
    if (own.get() == &module) into.push_back(std::move(own));
  }
}

}  // namespace

Modules fsdp_modules(ModuleRef module, bool root_only) {
  Modules found;
  if (is_replicated(module.get())) return found;
  std::unordered_set<const torch::nn::Module*> seen{&module.get()};
  append_if_unit(module.get(), found);
  append_units(module.get(), seen, found);
  if (root_only) std::erase_if(found, [](const auto& one) { return !detail::is_root(*one); });
  return found;
}

}  // namespace tessera
