#include "tessera/optimizer_in_backward.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

// Runs when a gradient is in the parameter's grad().
class Step : public torch::autograd::PostAccumulateGradHook {
 public:
  explicit Step(std::unique_ptr<torch::optim::Optimizer> optimizer)
      : optimizer_(std::move(optimizer)) {}
  void operator()(const torch::autograd::Variable&) override {
    const torch::NoGradGuard no_grad;
    optimizer_->step();
    optimizer_->zero_grad();
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

void require_possible(const ShardedParameter& parameter) {
  if (!parameter.members.empty()) {
    throw Error(ErrorCode::invalid_argument,
                "FSDP optimizer in backward only supported with use_orig_params=True!")
        .at_key(parameter.name());
  }
  if (torch::autograd::impl::post_acc_grad_hooks(parameter.local)) {
    throw Error(ErrorCode::unsupported,
                "an optimizer in backward takes parameters that fully_shard or "
                "FullyShardedDataParallel shards, or that are in no unit, and that have no "
                "post-accumulate hook yet")
        .at_key(parameter.name());
  }
}

}  // namespace

void apply_optimizer_in_backward(const std::vector<ShardedParameter>& parameters,
                                 const MakeOptimizer& make) {
  std::vector<std::pair<torch::Tensor, std::unique_ptr<Step>>> steps;
  for (const auto& parameter : parameters) {
    if (!parameter.local.requires_grad()) continue;
    require_possible(parameter);
    steps.emplace_back(parameter.local, std::make_unique<Step>(make({parameter.local})));
  }
  for (auto& [local, step] : steps)
    torch::autograd::impl::set_post_acc_grad_hooks(local, std::move(step));
}

}  // namespace tessera
