// The states of optimizers by name, with the options of PyTorch's get_state_dict and set_state_dict
// (checkpoint-rows P-30).
#pragma once

#include <vector>

#include <torch/nn/module.h>

#include "optim_state/optim_model.h"
#include "tessera/pytorch/distributed_state_dict.h"

namespace tessera::detail {

using Optimizers = std::vector<OptimizerRef>;

// When it is set, rank 0's whole state counts, and others need none.
[[nodiscard]] inline bool is_first_ranks(const DistributedStateDictOptions& options) {
  return options.broadcast_from_rank0 || (options.full_state_dict && options.cpu_offload);
}

// Collective.
[[nodiscard]] Value optimizers_by_name(const torch::nn::Module& module, const Optimizers& optims,
                                       const DistributedStateDictOptions& options);

// A state that optimizers are to get: all of it is made and checked before any of it is set.
class OptimizersSetter {
 public:
  // Collective; throws alike on all ranks.
  OptimizersSetter(const torch::nn::Module& module, const Optimizers& optims, const Value& state,
                   const DistributedStateDictOptions& options);
  // Local.
  void apply() const;

 private:
  const Optimizers& optims_;
  std::vector<Value> loaded_;  // of each its own form
};

}  // namespace tessera::detail
