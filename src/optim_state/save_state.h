// From an optimizer's state to the state by names, whole or in chunks.
#pragma once

#include <optional>

#include "optim_state/optim_model.h"

namespace tessera::detail {

struct SaveRequest {
  bool in_chunks = false;   // else whole
  bool rank0_only = false;  // whole: the other ranks get an empty dict
  std::optional<OptimInput> optim_input = {};
  std::optional<Value> state = {};  // unset: the optimizer's own
  std::optional<Mesh> group = {};
};

// Collective.
[[nodiscard]] Value save_state(const torch::nn::Module& module, const OptimizerRef& optim,
                               const SaveRequest& request);

}  // namespace tessera::detail
