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
  // In float32 at least: sums in bfloat16 would be too rough (fsdp-rows CG2).
  const auto type = at::promote_types(gradients.front().scalar_type(), at::kFloat);
  const auto norms =
      at::stack(at::_foreach_norm(gradients, p, type)).to(torch::kCPU, torch::kFloat64);
  return std::isinf(p) ? norms.max().item<double>() : norms.pow(p).sum().item<double>();
}

struct Gradients {
  std::vector<at::Tensor> shards, wholes;
  std::optional<Mesh> mesh;  // of the shards
};

void require_one_mesh(const ShardedParameter& parameter, const std::optional<Mesh>& mesh) {
  if (!mesh || *mesh == *parameter.mesh) return;
  throw Error(ErrorCode::unsupported, "gradients of two meshes in one norm")
      .at_key(parameter.name());
}

Gradients gradients_of(const std::vector<ShardedParameter>& parameters) {
  Gradients found;
  for (const auto& parameter : parameters) {
    if (parameter.sharded) {
      require_one_mesh(parameter, found.mesh);
      found.mesh = parameter.mesh;
    }
    const auto& gradient = parameter.local.grad();
    // Of no elements libtorch knows no largest one.
    if (!gradient.defined() || gradient.numel() == 0) continue;
    (parameter.sharded ? found.shards : found.wholes).push_back(gradient);
  }
  return found;
}

double norm_of(const Gradients& gradients, double norm_type) {
  const double shards = power_sum(gradients.shards, norm_type);
  const double wholes = power_sum(gradients.wholes, norm_type);
  const auto& mesh = gradients.mesh;
  if (std::isinf(norm_type)) {
    const double largest = std::max(shards, wholes);
    return mesh ? mesh->all_reduce_max(largest) : largest;
  }
  const double sum = mesh ? mesh->all_reduce_sum(shards) : shards;
  return std::pow(sum + wholes, 1 / norm_type);
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
  const auto gradients = gradients_of(parameters);
  const double norm = norm_of(gradients, norm_type);
  // As torch: written so that a norm that is not a number reaches the gradients and is noticed.
  const double factor = max_norm / (norm + 1e-6);
  if (!(factor >= 1.0)) {
    auto all = gradients.shards;
    all.insert(all.end(), gradients.wholes.begin(), gradients.wholes.end());
    if (!all.empty()) at::_foreach_mul_(all, factor);
  }
  return norm;
}

}  // namespace tessera
