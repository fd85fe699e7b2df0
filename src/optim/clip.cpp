#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"

namespace tessera {

namespace {

// Of |g|^p over all elements; for the largest magnitude p is infinity and the sum a maximum.
double power_sum(const std::vector<at::Tensor>& gradients, double p) {
  if (gradients.empty()) return 0;
  // In float32 at least: sums in bfloat16 would be too rough (spec CG2).
  const auto type = at::promote_types(gradients.front().scalar_type(), at::kFloat);
  const auto norms =
      at::stack(at::_foreach_norm(gradients, p, type)).to(torch::kCPU, torch::kFloat64);
  return std::isinf(p) ? norms.max().item<double>() : norms.pow(p).sum().item<double>();
}

}  // namespace

double clip_grad_norm(const std::vector<ShardedParameter>& parameters, double max_norm,
                      double norm_type) {
  if (!(norm_type > 0)) {
    throw Error(ErrorCode::invalid_argument,
                "a norm of type " + std::to_string(norm_type) + ", expected one above 0");
  }
  const torch::NoGradGuard no_grad;
  const TakesParts takes_parts;
  const Purpose purpose("the norm of gradients");
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
    // Of no elements libtorch knows no largest one.
    if (!parameter.local.grad().defined() || parameter.local.grad().numel() == 0) continue;
    (parameter.sharded ? shards : wholes).push_back(parameter.local.grad());
  }
  double total = power_sum(shards, norm_type);
  double norm = 0;
  if (std::isinf(norm_type)) {
    total = std::max(total, power_sum(wholes, norm_type));
    norm = mesh ? mesh->all_reduce_max(total) : total;
  } else {
    if (mesh) total = mesh->all_reduce_sum(total);
    norm = std::pow(total + power_sum(wholes, norm_type), 1 / norm_type);
  }
  // As torch: written so that a norm that is not a number reaches the gradients and is noticed.
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1.0)) {
    shards.insert(shards.end(), wholes.begin(), wholes.end());
    if (!shards.empty()) at::_foreach_mul_(shards, factor);
  }
  return norm;
}

}  // namespace tessera
