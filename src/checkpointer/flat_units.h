// The flat parameters of a live model, as files of the kind olmo_local describe them, and the names
// that Python's FSDP gives what is below its wrappers.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/dtype.h"
#include "tessera/layout.h"
#include "tessera/module_ref.h"

namespace tessera::detail {

// A module that FSDP1 wraps.
struct LiveFlatUnit {
  std::string path;                // below the model, whose own is empty
  std::vector<std::string> names;  // of the parameters in its flat parameter, whole, in order
  std::vector<Shape> shapes;       // theirs
};

struct LiveFlatModel {
  std::vector<LiveFlatUnit> units;    // the root first, in the order of named_modules
  bool orig_params = true;            // parameters begin at multiples of 16 bytes
  DType aligned_as = DType::float32;  // the type that these bytes are counted in
  int shards = 1;                     // ranks that share each flat parameter
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
