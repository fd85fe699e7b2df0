// Batches and losses of the runtime's tests, the same for every way of sharding.
#pragma once

#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

#include "fsdp/testing/test_model.h"
#include "tessera/optim.h"

namespace tessera::testing {

constexpr int kSteps = 3;
constexpr int kRows = 3;  // of each rank

// Micro-batch `micro` of step `step` for all of `world` ranks.
inline torch::Tensor batch(int step, int micro, int world) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 10 * step + micro);
  return torch::randint(0, kVocabulary, {kRows * world, 5}, generator, torch::kInt64);
}
// What `rank` gets of it.
inline torch::Tensor batch_of(int step, int micro, const Mesh& mesh) {
  return batch(step, micro, mesh.size()).narrow(0, kRows * mesh.rank(), kRows);
}

template <typename Model>
torch::Tensor loss_of(Model& net, const torch::Tensor& tokens) {
  auto logits = net(tokens.narrow(1, 0, 4));
  if (logits.scalar_type() != torch::kDouble) logits = logits.to(torch::kFloat);
  return torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}),
                                   tokens.narrow(1, 1, 4).reshape({-1}).to(logits.device()));
}

inline torch::optim::SGDOptions sgd_options() {
  return torch::optim::SGDOptions(0.2).momentum(0.9);
}

// kSteps steps on all ranks' batches together, not sharded, gradients clipped to norm 1.
struct Reference {
  std::vector<double> losses, norms;
  std::map<std::string, torch::Tensor> parameters;
};
inline Reference reference(int world, int micros, bool tied) {
  auto net = make_net({.tied = tied});
  // parameters() of libtorch names a shared parameter twice.
  const auto named = sharded_parameters(net);
  torch::optim::SGD optimizer(local_tensors(named), sgd_options());
  Reference result;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    double sum = 0;
    for (int micro = 0; micro < micros; ++micro) {
      auto loss = loss_of(net, batch(step, micro, world));
      loss.backward();
      sum += loss.item<double>();
    }
    result.losses.push_back(sum);
    result.norms.push_back(torch::nn::utils::clip_grad_norm_(local_tensors(named), 1.0));
    optimizer.step();
  }
  for (const auto& parameter : named)
    result.parameters[parameter.name()] = parameter.local.detach();
  return result;
}

}  // namespace tessera::testing
