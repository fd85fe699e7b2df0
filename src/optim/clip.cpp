#include <torch/torch.h>

#include <vector>

#include "comm/whereabouts.h"
#include "optim/norm_parts.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

std::vector<at::Tensor> gradients_of(const std::vector<ShardedParameter>& parameters) {
  std::vector<at::Tensor> gradients;
  for (const auto& parameter : parameters) {
    const auto& gradient = parameter.local.grad();
    if (!gradient.defined() || gradient.numel() == 0) continue;
    if (gradient.is_sparse()) {
      gradients.push_back(gradient._values());
      continue;
    }
    make_plain(gradient);
    gradients.push_back(gradient);
  }
  return gradients;
}

}  // namespace

double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm,
                      double norm_type) {
  detail::require_norm_type(norm_type);
  const torch::NoGradGuard no_grad;
  const TakesParts takes_parts;
  const Purpose purpose(detail::purpose_of(NormOf::gradients));
  const auto gradients = gradients_of(parameters);
  const double norm =
      detail::total_norm(detail::norm_parts(parameters, NormOf::gradients), norm_type);
  // As torch: written so that a norm that is not a number reaches the gradients and is noticed.
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1.0) && !gradients.empty()) at::_foreach_mul_(gradients, factor);
  return norm;
}

}  // namespace tessera
