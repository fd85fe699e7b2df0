// The mesh of a live model in which ranks hold copies.
#pragma once

#include <optional>

#include "tessera/module_ref.h"
#include "tessera/olmo_save.h"

namespace tessera::detail {

// None: no unit of `model` has copies. All ranks have the same.
[[nodiscard]] std::optional<OlmoMesh> hybrid_mesh_of(ModuleRef model);

}  // namespace tessera::detail
