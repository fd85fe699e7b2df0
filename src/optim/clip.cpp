#include <torch/torch.h>

#include <cmath>

#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera {

double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm) {
  torch::NoGradGuard no_grad;
  std::vector<at::Tensor> shards, wholes;
  std::optional<Mesh> mesh;
  for (const auto& parameter : parameters) {
    if (parameter.sharded) {
      if (mesh && *mesh != *parameter.mesh) {
        throw Error(ErrorCode::unsupported, "gradients of two meshes in one norm")
            .at_key(parameter.name());
      }
      mesh = parameter.mesh;
    }
    if (!parameter.local.grad().defined()) continue;
    (parameter.sharded ? shards : wholes).push_back(parameter.local.grad());
  }
  const auto sum_of_squares = [](const std::vector<at::Tensor>& gradients) {
    double sum = 0;
    if (gradients.empty()) return sum;
    const auto norms = at::stack(at::_foreach_norm(gradients)).to(torch::kCPU, torch::kFloat64);
    return norms.square().sum().item<double>();
  };
  double total = sum_of_squares(shards);
  if (mesh) total = mesh->all_reduce_sum(total);
  const double norm = std::sqrt(total + sum_of_squares(wholes));
  // As torch: written so that a norm that is not a number reaches the gradients and is noticed.
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1.0)) {
    shards.insert(shards.end(), wholes.begin(), wholes.end());
    if (!shards.empty()) at::_foreach_mul_(shards, factor);
  }
  return norm;
}

}  // namespace tessera
