// The mesh of a live model in which ranks hold copies.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/parameter.h"
#include "tessera/save_options.h"

namespace tessera::detail {

// None: no unit of `model` has copies. All ranks have the same.
[[nodiscard]] std::optional<OlmoMesh> hybrid_mesh_of(ModuleRef model);

// The flat parameters of a live model, as files of the kind olmo_local describe them, and the names
// that Python's FSDP gives what is below its wrappers.

struct LiveFlatModel {
  OlmoSave layout;  // units, orig_params and aligned_as
  int shards = 1;   // ranks that share each flat parameter
};

// All ranks have the same. Throws `unsupported`, naming the kinds that fit, for a model that is not
// FSDP1's alone: a parameter or buffer in no flat parameter, units of two geometries, or with types
// that align differently.
[[nodiscard]] LiveFlatModel flat_model_of(ModuleRef model);

// Whether FSDP1 wraps modules of `model`, itself included.
[[nodiscard]] bool has_flat_units(ModuleRef model);

// `names` of parameters as Python's named_parameters gives them, with FSDP1's wrappers.
class WrappedNames {
 public:
  explicit WrappedNames(ModuleRef model);
  [[nodiscard]] std::string of(const std::string& name) const;

 private:
  std::vector<std::string> modules_;  // that are wrapped, sorted
};

}  // namespace tessera::detail
