#include <torch/torch.h>

#include <cmath>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "comm/whereabouts.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"
#include "torch/tensor.h"

namespace tessera {

namespace {

// Of |g|^p; for the largest magnitude p is infinity and the sum a maximum. NaN where one is.
double joined(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return std::isnan(a) || a > b ? a : b;
}

// Of all elements of gradients of one type. In float32 at least: sums in bfloat16 would be too
// rough (fsdp-rows CG2).
double power_sum_of_one_type(const std::vector<at::Tensor>& gradients, double p) {
  const auto type = at::promote_types(gradients.front().scalar_type(), at::kFloat);
  const auto norms =
      at::stack(at::_foreach_norm(gradients, p, type)).to(torch::kCPU, torch::kFloat64);
  return std::isinf(p) ? norms.max().item<double>() : norms.pow(p).sum().item<double>();
}

// Which gradients a rank holds says nothing about the type of the sum, which travels as a double.
double power_sum(const std::vector<at::Tensor>& gradients, double p) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const auto& gradient : gradients) by_type[gradient.scalar_type()].push_back(gradient);
  double sum = 0;
  for (const auto& [type, of_type] : by_type)
    sum = joined(sum, power_sum_of_one_type(of_type, p), p);
  return sum;
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
    make_plain(gradient);
    (parameter.sharded ? found.shards : found.wholes).push_back(gradient);
  }
  return found;
}

double norm_of(const Gradients& gradients, double norm_type) {
  const double shards = power_sum(gradients.shards, norm_type);
  const double wholes = power_sum(gradients.wholes, norm_type);
  const auto& mesh = gradients.mesh;
  if (std::isinf(norm_type)) {
    const double largest = joined(shards, wholes, norm_type);
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
