// The registry of units by module and by parameter: modules have no place to keep it in.
//
// Entries do not keep anything alive: units belong to their mesh until their modules die. Lookups
// may come from several threads.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/unit/unit.h"

namespace tessera::detail {

// find_unit(module) is in tessera/detail/call.h.

struct ParamOwner {
  std::shared_ptr<Unit> unit;
  std::size_t index = 0;  // in unit->params()

  [[nodiscard]] bool is_sharded() const { return unit && unit->is_sharded(); }
};
// Null unit: not a parameter of any.
[[nodiscard]] ParamOwner find_owner(const at::Tensor& parameter);

// The name in FSDP1 of the flat parameter of the unit that has this name.
[[nodiscard]] inline std::string flat_param_name(const std::string& unit) {
  return unit.empty() ? "_flat_param" : unit + "._flat_param";
}

// The units at and below `module` with their names below it, each once, in module order.
[[nodiscard]] std::vector<std::pair<std::string, std::shared_ptr<Unit>>> units_below(
    const torch::nn::Module& module);
// What users put in the place of their parameters is what they have (Unit::refresh). Throws
// `mismatch` when the ranks did not reduce the same: of all reductions, unless `how` says less.
void refresh_units(const torch::nn::Module& module, GradReducer::Look how = GradReducer::Look::all);

// Enters `unit`, and forgets units of this mesh whose modules have died.
void register_unit(const std::shared_ptr<Unit>& unit, const Mesh& mesh);

}  // namespace tessera::detail
