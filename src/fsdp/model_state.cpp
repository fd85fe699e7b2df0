#include <torch/torch.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "fsdp/registry.h"
#include "tessera/fsdp.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using Leaves = std::unordered_map<const c10::TensorImpl*, Value>;

Tensor parameter_leaf(const at::Tensor& tensor) {
  const auto owner = detail::find_owner(tensor);
  if (!owner.unit || !owner.unit->is_sharded()) return leaf_of(tensor);
  const auto& unit = *owner.unit;
  const auto make = unit.geometry() == detail::Geometry::rows ? sharded_leaf_of : flat_leaf_of;
  return make(unit.held(owner.index), tensor.sizes().vec(), unit.held_from(owner.index));
}

// As Python's state_dict(): a module's own parameters, its buffers, then its children.
void append(const torch::nn::Module& module, const std::string& prefix, const Leaves& leaves,
            std::vector<Value::Pair>& into) {
  for (const auto& entry : module.named_parameters(false)) {
    if (!entry.value().defined()) continue;
    into.emplace_back(prefix + entry.key(), leaves.at(entry.value().unsafeGetTensorImpl()));
  }
  for (const auto& entry : module.named_buffers(false)) {
    if (entry.value().defined()) into.emplace_back(prefix + entry.key(), leaf_of(entry.value()));
  }
  for (const auto& child : module.named_children()) {
    append(*child.value(), prefix + child.key() + ".", leaves, into);
  }
}

}  // namespace

Value model_state(const torch::nn::Module& module) {
  Leaves leaves;
  for (const auto& entry : module.named_parameters()) {
    const auto& tensor = entry.value();
    if (tensor.defined()) leaves.try_emplace(tensor.unsafeGetTensorImpl(), parameter_leaf(tensor));
  }
  std::vector<Value::Pair> pairs;
  append(module, "", leaves, pairs);
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

}  // namespace tessera
