#include "checkpointer/flat_units.h"

#include <algorithm>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>

#include <torch/torch.h>

#include "format/sharded/sharded.h"
#include "fsdp/state/state_dict.h"
#include "fsdp/unit/registry.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::detail {

std::optional<OlmoMesh> hybrid_mesh_of(ModuleRef model) {
  for (const auto& [path, unit] : units_below(model.get())) {
    if (!unit->is_hybrid()) continue;
    return OlmoMesh{unit->all_ranks().size() / unit->mesh().size(),
                    c10::DeviceTypeName(unit->device().type(), /*lower_case=*/true)};
  }
  return std::nullopt;
}

namespace {

// The first name of each tensor, in the order of state_dict(): Python's flat parameters list a
// shared parameter once.
using NamesByTensor = std::unordered_map<const c10::TensorImpl*, std::string>;

[[noreturn]] void refuse(const std::string& why, const std::string& key) {
  throw Error(ErrorCode::unsupported,
              "the checkpointer `local` keeps flat parameters of FSDP1 and nothing else, and " +
                  why + ": `full`, `torch_new` and `torch_legacy` keep any model")
      .at_key(key);
}

// What of a model lies in no flat parameter.
void require_all_flat(const std::vector<StateEntry>& entries) {
  for (const auto& entry : entries) {
    const auto owner = find_owner(entry.tensor);
    if (!owner.unit) refuse("this is in none", entry.name);
    if (!owner.unit->is_fsdp1()) refuse("this is sharded in another way", entry.name);
  }
}

DType aligned_type(const Unit& unit) {
  const auto own = unit.params().front().full.scalar_type();
  return dtype_of(unit.options().mixed_precision.param_dtype.value_or(own));
}

// The properties that all units with parameters have in common.
struct Common {
  bool orig_params = true;
  std::size_t element_size = 0;  // 0: no unit was seen
  DType type = DType::float32;
  int shards = 1;

  void take(const Unit& unit, const std::string& path) {
    if (unit.params().empty()) return;
    const bool original = unit.geometry() == Geometry::flat_original;
    const auto dtype = aligned_type(unit);
    const int ranks = unit.is_sharded() ? unit.mesh().size() : 1;
    if (element_size == 0) {
      *this = {original, size_of(dtype), dtype, ranks};
    } else if (original != orig_params) {
      refuse("units differ in use_orig_params", path);
    } else if (original && size_of(dtype) != element_size) {
      refuse("units compute in types of different sizes", path);
    } else if (ranks != shards) {
      refuse("units are shared by different numbers of ranks", path);
    }
  }
};

FlatUnit unit_of(const std::string& path, const Unit& unit, const NamesByTensor& names) {
  FlatUnit made{.path = path, .names = {}};
  for (const auto& param : unit.params())
    made.names.push_back(names.at(param.full.unsafeGetTensorImpl()));
  return made;
}

}  // namespace

LiveFlatModel flat_model_of(ModuleRef model) {
  const auto entries = state_entries(model.get());
  require_all_flat(entries);
  NamesByTensor names;
  for (const auto& entry : entries) names.emplace(entry.tensor.unsafeGetTensorImpl(), entry.name);
  LiveFlatModel made;
  Common common;
  for (const auto& [path, unit] : units_below(model.get())) {
    common.take(*unit, path);
    made.layout.units.push_back(unit_of(path, *unit, names));
  }
  if (made.layout.units.empty()) refuse("this model has no units", "model");
  // Python's root is always wrapped, and comes first.
  if (!made.layout.units.front().path.empty()) refuse("the model itself is no unit", "model");
  made.layout.orig_params = common.orig_params;
  made.layout.aligned_as = common.type;
  made.shards = common.shards;
  return made;
}

bool has_flat_units(ModuleRef model) {
  return std::ranges::any_of(units_below(model.get()),
                             [](const auto& named) { return named.second->is_fsdp1(); });
}

WrappedNames::WrappedNames(ModuleRef model) {
  for (const auto& [path, unit] : units_below(model.get())) {
    if (unit->is_fsdp1()) modules_.push_back(path);
  }
  std::ranges::sort(modules_);
}

std::string WrappedNames::of(const std::string& name) const {
  return sharded::wrapped_name(name, [this](const std::string& module) {
    return std::ranges::binary_search(modules_, module);
  });
}

}  // namespace tessera::detail
