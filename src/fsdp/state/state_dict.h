// The entries that Python's state_dict() of a module lists, in its order.
#pragma once

#include <string>
#include <unordered_map>
#include <vector>

#include <torch/nn/module.h>

#include "fsdp/unit/unit_buffers.h"
#include "tessera/value.h"

namespace tessera::detail {

struct StateEntry {
  std::string name;
  at::Tensor tensor;
};

// A module's own parameters, its buffers, then its children. Those without a tensor are left out,
// and buffers that are not persistent.
inline void append_state_entries(const torch::nn::Module& module, const std::string& prefix,
                                 std::vector<StateEntry>& into) {
  for (const auto& entry : module.named_parameters(false)) {
    if (entry.value().defined()) into.push_back({prefix + entry.key(), entry.value()});
  }
  for (const auto& entry : module.named_buffers(false)) {
    if (entry.value().defined() && is_persistent(entry.value(), entry.key()))
      into.push_back({prefix + entry.key(), entry.value()});
  }
  for (const auto& child : module.named_children())
    append_state_entries(*child.value(), prefix + child.key() + ".", into);
}

inline std::vector<StateEntry> state_entries(const torch::nn::Module& module) {
  std::vector<StateEntry> entries;
  append_state_entries(module, "", entries);
  return entries;
}

// The types that buffers had before mixed precision cast them.
using TypesOfBuffers = std::unordered_map<const c10::TensorImpl*, at::ScalarType>;
[[nodiscard]] TypesOfBuffers types_of_buffers(const torch::nn::Module& module);

// The part of a parameter or buffer that this rank holds, as a leaf over its own memory. Whoever
// gets the leaf of a sharded parameter may write to the shard, so its unit takes it for changed.
[[nodiscard]] Tensor own_leaf(const at::Tensor& tensor);

// Throws `mismatch` unless `given` is a tensor of `shape`.
void require_shape(const std::string& name, const Shape& shape, const Value& given);
// Throws `invalid_argument` for a parameter whose unit is in a forward or backward.
void require_quiet(const at::Tensor& tensor);
// Copies a whole tensor into a parameter or buffer; of a sharded one each rank keeps its own part.
void set_entry(const at::Tensor& tensor, const at::Tensor& given);

}  // namespace tessera::detail
