// From the state by names, whole or in chunks, to the state of one rank's optimizer.
#pragma once

#include <cstdint>
#include <optional>

#include "optim_state/optim_model.h"

namespace tessera::detail {

enum class LoadSource : std::uint8_t {
  own,         // every rank has the whole state
  first_rank,  // rank 0 has it
  chunks,      // every rank has its chunk of every tensor
};

struct LoadRequest {
  LoadSource source = LoadSource::own;
  std::optional<OptimizerRef> optim = {};
  std::optional<OptimInput> optim_input = {};
  bool by_name = false;  // keys of the result
  std::optional<Mesh> group = {};
};

// `state` null: this rank has none. Tensors of the result are nobody else's. Collective but for
// `own`.
[[nodiscard]] Value load_state(const torch::nn::Module& module, const Value* state,
                               const LoadRequest& request);

}  // namespace tessera::detail
