#include "optim/norms.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include <torch/torch.h>

#include "comm/whereabouts.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "torch/rank_local.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

using detail::NormParts;

// float64 on the CPU, for each tensor the sum of |x|^p, or where p is infinity the largest
// magnitude; 0 of one that is undefined. In float32 at least: sums in bfloat16 would be too rough
// (fsdp-rows CG2).
at::Tensor powers_of(const std::vector<at::Tensor>& tensors, double p) {
  std::map<at::ScalarType, std::vector<std::int64_t>> by_type;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    if (tensors[i].defined())
      by_type[tensors[i].scalar_type()].push_back(static_cast<std::int64_t>(i));
  }
  auto powers = torch::zeros({static_cast<std::int64_t>(tensors.size())}, torch::kFloat64);
  for (const auto& [type, places] : by_type) {
    std::vector<at::Tensor> of_type;
    for (const auto place : places) of_type.push_back(tensors[static_cast<std::size_t>(place)]);
    const auto wide = at::promote_types(type, at::kFloat);
    const auto norms =
        at::stack(at::_foreach_norm(of_type, p, wide)).to(torch::kCPU, torch::kFloat64);
    powers.index_copy_(0, torch::tensor(places, torch::kInt64),
                       std::isinf(p) ? norms : norms.pow(p));
  }
  return powers;
}

// The same of what is on a device, as one number there: the host does not wait for it.
at::Tensor joined_there(const std::vector<at::Tensor>& tensors, double p) {
  std::map<at::ScalarType, std::vector<at::Tensor>> by_type;
  for (const auto& tensor : tensors) by_type[tensor.scalar_type()].push_back(tensor);
  std::vector<at::Tensor> all;
  for (const auto& [type, of_type] : by_type) {
    const auto wide = at::promote_types(type, at::kFloat);
    all.push_back(at::stack(at::_foreach_norm(of_type, p, wide)).to(at::kDouble));
  }
  const auto norms = all.size() == 1 ? all.front() : at::cat(all);
  return std::isinf(p) ? norms.amax() : norms.pow(p).sum();
}

// NaN where one is.
double joined(const at::Tensor& powers, double p) {
  if (powers.numel() == 0) return 0;
  return (std::isinf(p) ? powers.max() : powers.sum()).item<double>();
}
double joined(double a, double b, double p) {
  if (!std::isinf(p)) return a + b;
  return std::isnan(a) || a > b ? a : b;
}

// As joined, on `device`. The host waits for it where the tensors are on the CPU of a mesh on a
// device (offload).
at::Tensor joined_on(at::Device device, const std::vector<at::Tensor>& tensors, double p) {
  std::vector<at::Tensor> here, there;
  for (const auto& tensor : tensors) {
    if (tensor.defined()) (tensor.is_cpu() ? here : there).push_back(tensor);
  }
  const auto place = at::TensorOptions(at::kDouble).device(device);
  if (there.empty()) return at::full({}, joined(powers_of(here, p), p), place);
  const auto of_there = joined_there(there, p).to(device);
  if (here.empty()) return of_there;
  const auto of_here = at::full({}, joined(powers_of(here, p), p), place);
  return std::isinf(p) ? at::maximum(of_there, of_here) : of_there + of_here;
}

// Norms from powers that all ranks have together.
at::Tensor roots(const at::Tensor& powers, double p) {
  return std::isinf(p) ? powers : powers.pow(1 / p);
}

at::Tensor mask_of(const std::vector<bool>& flags) {
  auto mask = torch::zeros({static_cast<std::int64_t>(flags.size())}, torch::kBool);
  for (std::size_t i = 0; i < flags.size(); ++i) mask.mutable_data_ptr<bool>()[i] = flags[i];
  return mask;
}

// Powers of each sharded parameter over the ranks that have parts of it.
at::Tensor over_ranks(const at::Tensor& powers, const Mesh& mesh, double p) {
  if (!std::isinf(p)) {
    auto sums = powers.to(mesh.device(), powers.scalar_type(), /*non_blocking=*/false,
                          /*copy=*/true);
    mesh.all_reduce_sum(sums);
    return sums;
  }
  return at::stack(all_gather(powers, mesh)).amax(0);
}

// The tensors that each rank has a part of, and those that it has as all others do.
struct Split {
  std::vector<at::Tensor> shards, wholes;
};

double norm_here(const Split& split, const std::optional<Mesh>& mesh, double p) {
  const double of_shards = joined(powers_of(split.shards, p), p);
  const double of_wholes = joined(powers_of(split.wholes, p), p);
  if (std::isinf(p)) {
    const double largest = joined(of_shards, of_wholes, p);
    return mesh ? mesh->all_reduce_max(largest) : largest;
  }
  const double sum = mesh ? mesh->all_reduce_sum(of_shards) : of_shards;
  return std::pow(sum + of_wholes, 1 / p);
}

// Every rank of a mesh on a device comes here, whatever it has.
at::Tensor norm_there(const Split& split, const std::optional<Mesh>& mesh, double p,
                      at::Device device) {
  auto total = joined_on(device, split.shards, p);
  if (mesh && mesh->size() > 1) total = over_ranks(total.unsqueeze(0), *mesh, p).squeeze(0);
  const bool has_wholes =
      std::ranges::any_of(split.wholes, [](const auto& one) { return one.defined(); });
  if (has_wholes) {
    const auto of_wholes = joined_on(device, split.wholes, p);
    total = std::isinf(p) ? at::maximum(total, of_wholes) : total + of_wholes;
  }
  return roots(total, p);
}

// The device that adds up norms: the one of the mesh's connections, else the tensors' own.
at::Device device_of(const NormParts& parts) {
  if (parts.mesh) return parts.mesh->device();
  const auto found =
      std::ranges::find_if(parts.tensors, [](const auto& one) { return one.defined(); });
  return found == parts.tensors.end() ? at::Device(at::kCPU) : found->device();
}

void require_one_mesh(const ShardedParameter& parameter, const std::optional<Mesh>& mesh) {
  if (!mesh || *mesh == *parameter.mesh) return;
  throw Error(ErrorCode::unsupported, "parameters of two meshes in one norm")
      .at_key(parameter.name());
}

}  // namespace

NormParts detail::norm_parts(const std::vector<ShardedParameter>& parameters, NormOf of) {
  NormParts parts;
  for (const auto& parameter : parameters) {
    if (parameter.sharded) {
      require_one_mesh(parameter, parts.mesh);
      parts.mesh = parameter.mesh;
    }
    const auto& tensor = of == NormOf::gradients ? parameter.local.grad() : parameter.local;
    parts.sharded.push_back(parameter.sharded);
    auto& part = parts.tensors.emplace_back();
    if (!tensor.defined()) continue;
    const auto values = tensor.is_sparse() ? tensor.detach().coalesce().values() : tensor.detach();
    // libtorch knows no largest element of none.
    if (values.numel() > 0) part = plain(values);
  }
  return parts;
}

void detail::require_norm_type(double norm_type) {
  if (norm_type > 0) return;
  throw Error(ErrorCode::invalid_argument,
              "a norm of type " + std::to_string(norm_type) + ", expected one above 0");
}

at::Tensor detail::total_norm(const NormParts& parts, double norm_type) {
  Split split;
  for (std::size_t i = 0; i < parts.tensors.size(); ++i)
    (parts.sharded[i] ? split.shards : split.wholes).push_back(parts.tensors[i]);
  const auto device = device_of(parts);
  if (!device.is_cpu()) return norm_there(split, parts.mesh, norm_type, device);
  return at::scalar_tensor(norm_here(split, parts.mesh, norm_type), at::kDouble);
}

double get_total_norm(const std::vector<ShardedParameter>& parameters, NormOf of,
                      double norm_type) {
  detail::require_norm_type(norm_type);
  const torch::NoGradGuard no_grad;
  const TakesParts takes_parts;
  const Purpose purpose(detail::purpose_of(of));
  return detail::total_norm(detail::norm_parts(parameters, of), norm_type).item<double>();
}

std::vector<std::pair<std::string, double>> norms_by_name(
    const std::vector<ShardedParameter>& parameters, NormOf of, double norm_type) {
  detail::require_norm_type(norm_type);
  const torch::NoGradGuard no_grad;
  const TakesParts takes_parts;
  const Purpose purpose(std::string(detail::purpose_of(of)) + " by name");
  const auto parts = detail::norm_parts(parameters, of);
  auto powers = powers_of(parts.tensors, norm_type);
  if (parts.mesh)
    powers =
        at::where(mask_of(parts.sharded), over_ranks(powers, *parts.mesh, norm_type).cpu(), powers);
  const auto norms = roots(powers, norm_type);
  std::vector<std::pair<std::string, double>> named;
  for (std::size_t i = 0; i < parameters.size(); ++i)
    named.emplace_back(parameters[i].name(), norms[static_cast<std::int64_t>(i)].item<double>());
  return named;
}

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
