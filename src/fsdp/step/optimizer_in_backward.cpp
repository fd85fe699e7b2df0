#include "tessera/optimizer_in_backward.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/torch.h>

#include <utility>

#include "tessera/error.h"

namespace tessera {
namespace {

// Gives `optimizer` another tensor to work on in the place of `old`.
void replace_parameter(torch::optim::Optimizer& optimizer, const at::Tensor& old,
                       const at::Tensor& fresh) {
  for (auto& group : optimizer.param_groups()) {
    for (auto& parameter : group.params()) {
      if (parameter.is_same(old)) parameter = fresh;
    }
  }
  auto& states = optimizer.state();
  const auto known = states.find(old.unsafeGetTensorImpl());
  if (known == states.end()) return;
  auto state = std::move(known->second);
  states.erase(known);
  states[fresh.unsafeGetTensorImpl()] = std::move(state);
}

// Runs when a gradient is in the parameter's grad(). The parameter owns the hook and the hook the
// optimizer; so that they die together the optimizer works on another tensor over the parameter's
// memory.
class Step : public torch::autograd::PostAccumulateGradHook {
 public:
  Step(const at::Tensor& parameter, std::unique_ptr<torch::optim::Optimizer> optimizer)
      : optimizer_(std::move(optimizer)), same_(parameter.detach().requires_grad_()) {
    replace_parameter(*optimizer_, parameter, same_);
  }
  void operator()(const torch::autograd::Variable& parameter) override {
    const torch::NoGradGuard no_grad;
    same_.set_data(parameter.detach());
    same_.mutable_grad() = parameter.grad();
    optimizer_->step();
    optimizer_->zero_grad();
    parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  at::Tensor same_;
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
    steps.emplace_back(parameter.local,
                       std::make_unique<Step>(parameter.local, make({parameter.local})));
  }
  for (auto& [local, step] : steps)
    torch::autograd::impl::set_post_acc_grad_hooks(local, std::move(step));
}

}  // namespace tessera
