// Optimizers that step inside of backward. A parameter's gradient is used and forgotten as soon as
// it is averaged, so the gradients of all units never exist at the same time.
//
//   apply_optimizer_in_backward(sharded_parameters(model), [](auto parameters) {
//     return std::make_unique<torch::optim::AdamW>(std::move(parameters), options);
//   });
//   loss_of(model).backward();   // and the parameters are changed
//   TrainingState state(model, optimizer_in_backward(sharded_parameters(model)));
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/optimizer_ref.h"
#include "tessera/parameter.h"

namespace [[gnu::visibility("default")]] tessera {

// Makes an optimizer for these tensors.
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor> parameters)>;

// Gives each parameter an optimizer of its own, which the parameter owns; a frozen one, too, which
// trains when it is thawed. Its groups then hold another tensor over the parameter's memory, so
// that both die together. It steps whenever the gradient is complete: averaged over the ranks if
// the parameter is sharded, accumulated if it is in no unit. If micro-batches accumulate without
// synchronisation, it steps after the one that synchronises. Gradients cannot be clipped. Throws
// `invalid_argument` for flat parameters (use_orig_params = false), and `unsupported` for
// parameters of replicate and NO_SHARD and for those that have a post-accumulate hook; then nothing
// was changed. Local.
void apply_optimizer_in_backward(const std::vector<ShardedParameter>& parameters,
                                 const MakeOptimizer& make);

// These optimizers as one, for functions on optimizer state. Parameters whose optimizers are of one
// type and have the same options now are one group, frozen ones among them. So what is saved loads
// into an ordinary optimizer of the same parameters, and the reverse; give the optimizers to load
// into other options where those that were saved had some. Throws `invalid_argument` if no
// parameter has an optimizer in backward, `unsupported` for a type that OptimizerRef does not know.
[[nodiscard]] OptimizerRef optimizer_in_backward(const std::vector<ShardedParameter>& parameters);

}  // namespace tessera
