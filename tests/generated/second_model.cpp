#include "generated/second_model.h"

#include "tessera/ddp.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"

namespace tessera::generated {
namespace {

using torch::Tensor;

torch::nn::Linear linear() {
  torch::nn::Linear made(5, 3);
  made->to(torch::kDouble);
  const torch::NoGradGuard no_grad;
  for (auto& parameter : made->parameters())
    parameter.copy_(
        torch::arange(parameter.numel()).view(parameter.sizes()).to(torch::kDouble).sin());
  return made;
}

std::unique_ptr<torch::optim::Optimizer> momentum(const std::vector<Tensor>& parameters) {
  return std::make_unique<torch::optim::SGD>(parameters,
                                             torch::optim::SGDOptions(0.05).momentum(0.9));
}

}  // namespace

SecondModel::SecondModel(const Layout& layout, Mesh& mesh)
    : mesh_(mesh), alone_(linear()), shared_(linear()) {
  if (layout.style == Style::rows) {
    fully_shard(shared_, mesh);
  } else if (layout.style == Style::flat || layout.style == Style::flat_original) {
    const FullyShardedDataParallel<torch::nn::Linear> wrapped(
        shared_, mesh, {.use_orig_params = layout.style == Style::flat_original});
  } else {
    replicate(shared_, mesh);
  }
  of_alone_ = momentum(alone_->parameters());
  of_shared_ = momentum(local_tensors(sharded_parameters(shared_)));
}

Tensor SecondModel::batch_of(int number, int rank) const {
  return torch::arange(10, torch::kDouble).view({2, 5}).mul(0.3 + rank).add(number).cos();
}

bool SecondModel::train(int number) {
  of_alone_->zero_grad();
  of_shared_->zero_grad();
  for (int rank = 0; rank < mesh_.size(); ++rank)
    (alone_(batch_of(number, rank)).square().mean() / mesh_.size()).backward();
  call_module(shared_, batch_of(number, mesh_.rank())).square().mean().backward();
  of_alone_->step();
  of_shared_->step();
  const auto whole = full_state_dict(shared_);
  return torch::allclose(whole["weight"], alone_->weight, 1e-10, 1e-10) &&
         torch::allclose(whole["bias"], alone_->bias, 1e-10, 1e-10);
}

}  // namespace tessera::generated
