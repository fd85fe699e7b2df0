// Optimizers that step inside of backward: a parameter's gradient is used and forgotten
// as soon as it is averaged, so that gradients of all units are never there at once.
//
//   apply_optimizer_in_backward(sharded_parameters(model), [](auto parameters) {
//     return std::make_unique<torch::optim::AdamW>(std::move(parameters), options);
//   });
//   loss_of(model).backward();   // and the parameters are changed
#pragma once

#include <torch/optim/optimizer.h>

#include <functional>
#include <memory>
#include <vector>

#include "tessera/parameter.h"

namespace tessera {

// Makes an optimizer for these tensors.
using MakeOptimizer =
    std::function<std::unique_ptr<torch::optim::Optimizer>(std::vector<torch::Tensor> parameters)>;

// Gives each parameter that requires a gradient an optimizer of its own, which steps whenever its
// gradient is there: averaged over the ranks where it is sharded, accumulated where it is in no
// unit. The parameter owns it. Where micro-batches accumulate without synchronisation it steps
// after the one that synchronises; gradients cannot be clipped. Throws `invalid_argument` for flat
// parameters (use_orig_params = false), and `unsupported` for parameters of replicate and NO_SHARD
// and for those that have a post-accumulate hook; then nothing was changed. Local.
void apply_optimizer_in_backward(const std::vector<ShardedParameter>& parameters,
                                 const MakeOptimizer& make);

}  // namespace tessera
