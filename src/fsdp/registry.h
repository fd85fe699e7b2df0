// Which module is which unit, and which parameter is whose: modules have no place to keep it in.
//
// Entries do not keep anything alive: units belong to their mesh. Lookups may come from several
// threads.
#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "fsdp/unit.h"

namespace tessera::detail {

// find_unit(module) is in tessera/detail/call.h.

struct ParamOwner {
  std::shared_ptr<Unit> unit;
  std::size_t index = 0;  // in unit->params()
};
// Null unit: not a parameter of any.
[[nodiscard]] ParamOwner find_owner(const at::Tensor& parameter);

// Enters `unit`, and forgets units whose module or mesh is gone.
void register_unit(const std::shared_ptr<Unit>& unit, const Mesh& mesh);

}  // namespace tessera::detail
