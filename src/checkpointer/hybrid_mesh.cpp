#include "checkpointer/hybrid_mesh.h"

#include <torch/torch.h>

#include "fsdp/unit/registry.h"

namespace tessera::detail {

std::optional<OlmoMesh> hybrid_mesh_of(ModuleRef model) {
  for (const auto& [path, unit] : units_below(model.get())) {
    if (!unit->is_hybrid()) continue;
    return OlmoMesh{unit->all_ranks().size() / unit->mesh().size(),
                    c10::DeviceTypeName(unit->device().type(), /*lower_case=*/true)};
  }
  return std::nullopt;
}

}  // namespace tessera::detail
