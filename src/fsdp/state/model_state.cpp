#include "fsdp/state/model_state.h"

#include <torch/torch.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "fsdp/state/state_entries.h"
#include "fsdp/unit/registry.h"
#include "fsdp/wrap/forgotten.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

Tensor leaf_at(const std::string& name, const at::Tensor& tensor,
               const detail::TypesOfBuffers& types) {
  const auto type = types.find(tensor.unsafeGetTensorImpl());
  try {
    if (type != types.end()) return leaf_of(tensor.detach().to(type->second));
    return detail::own_leaf(tensor);
  } catch (Error& error) {
    throw error.at_key(name);
  }
}

// Buffers of `types` are copies in those.
Value state_with(ModuleRef module, const detail::TypesOfBuffers& types) {
  detail::refresh_units(module.get());
  detail::warn_of_forgotten(module.get());
  std::unordered_map<const c10::TensorImpl*, Value> leaves;
  std::vector<Value::Pair> pairs;
  for (const auto& [name, tensor] : detail::state_entries(module.get())) {
    const auto* impl = tensor.unsafeGetTensorImpl();
    auto known = leaves.find(impl);
    if (known == leaves.end()) known = leaves.emplace(impl, leaf_at(name, tensor, types)).first;
    pairs.emplace_back(name, known->second);
  }
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

}  // namespace

Tensor detail::own_leaf(const at::Tensor& tensor) {
  const auto owner = find_owner(tensor);
  if (!owner.unit || !owner.unit->is_sharded()) return leaf_of(tensor);
  auto& unit = *owner.unit;
  unit.changes().hand_out();
  const auto held = unit.held(owner.index);
  const auto from = unit.held_from(owner.index);
  const auto shape = tensor.sizes().vec();
  auto leaf = unit.geometry() == Geometry::rows
                  ? sharded_leaf_of(held, shape, from, unit.layout().params[owner.index].dim)
                  : flat_leaf_of(held, shape, from);
  leaf.placement = unit.placement_of(owner.index);
  return leaf;
}

detail::TypesOfBuffers detail::types_of_buffers(const torch::nn::Module& module) {
  TypesOfBuffers types;
  for (const auto& [name, unit] : units_below(module)) {
    for (const auto& [buffer, type] : unit->buffers().cast())
      types.emplace(buffer.unsafeGetTensorImpl(), type);
  }
  return types;
}

Value model_state(ModuleRef module) {
  return state_with(module, {});
}

Value model_state_to_save(ModuleRef module) {
  return state_with(module, detail::types_of_buffers(module.get()));
}

}  // namespace tessera
