#include <torch/torch.h>

#include <string>
#include <unordered_map>
#include <utility>

#include "tessera/fsdp.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using Leaves = std::unordered_map<const c10::TensorImpl*, Value>;

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
  const auto parameters = sharded_parameters(module);
  std::unordered_map<std::string, const ShardedParameter*> by_name;
  for (const auto& parameter : parameters) by_name.emplace(parameter.name(), &parameter);
  Leaves leaves;
  for (const auto& entry : module.named_parameters()) {
    const auto found = by_name.find(entry.key());
    if (found == by_name.end()) continue;  // another name of one that was there before
    const auto& parameter = *found->second;
    leaves.emplace(entry.value().unsafeGetTensorImpl(),
                   parameter.sharded
                       ? sharded_leaf_of(parameter.local, parameter.shape, parameter.offset)
                       : leaf_of(parameter.local));
  }
  std::vector<Value::Pair> pairs;
  append(module, "", leaves, pairs);
  return Value::dict(std::move(pairs), DictKind::ordered_dict);
}

}  // namespace tessera
