#include <torch/torch.h>

#include <algorithm>
#include <vector>

#include "comm/whereabouts.h"
#include "optim/norm_parts.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using Tensors = std::vector<at::Tensor>;

// Beside a norm that is divided by, which may be 0: torch's.
constexpr double kLeast = 1e-6;

Tensors gradients_of(const std::vector<ShardedParameter>& parameters) {
  Tensors gradients;
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

void scale_here(const Tensors& gradients, double max_norm, double norm) {
  // As torch: written so that a norm that is not a number reaches the gradients and is noticed.
  const double factor = max_norm / (norm + kLeast);
  if (!(factor >= 1.0)) at::_foreach_mul_(gradients, factor);
}

// Whether the factor is below 1 is not known here: they are multiplied by 1 as well. One kernel
// takes all of a dtype if the factor has it, too.
void scale_there(const Tensors& gradients, double max_norm, const at::Tensor& norm) {
  const auto factor =
      at::div(at::scalar_tensor(max_norm, at::kDouble), norm + kLeast).clamp_max_(1.0);
  Tensors rest = gradients;
  while (!rest.empty()) {
    const auto first = rest.front();
    const auto others = std::ranges::stable_partition(rest, [&](const auto& gradient) {
      return gradient.scalar_type() == first.scalar_type() && gradient.device() == first.device();
    });
    at::_foreach_mul_(Tensors(rest.begin(), others.begin()), factor.to(first.options()));
    rest.erase(rest.begin(), others.begin());
  }
}

}  // namespace

torch::Tensor clip_grad_norm_(const std::vector<ShardedParameter>& parameters, double max_norm,
                              double norm_type) {
  detail::require_norm_type(norm_type);
  const torch::NoGradGuard no_grad;
  const TakesParts takes_parts;
  const Purpose purpose(detail::purpose_of(NormOf::gradients));
  auto gradients = gradients_of(parameters);
  auto norm = detail::total_norm(detail::norm_parts(parameters, NormOf::gradients), norm_type);
  const auto there =
      std::ranges::stable_partition(gradients, [](const auto& one) { return one.is_cpu(); });
  const Tensors here(gradients.begin(), there.begin());
  if (!here.empty()) scale_here(here, max_norm, norm.item<double>());
  if (!there.empty()) scale_there({there.begin(), there.end()}, max_norm, norm);
  return norm;
}

double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm,
                      double norm_type) {
  return clip_grad_norm_(parameters, max_norm, norm_type).item<double>();
}

}  // namespace tessera
