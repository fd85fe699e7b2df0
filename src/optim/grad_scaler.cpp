#include "tessera/grad_scaler.h"

#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/_amp_update_scale.h>
#include <torch/torch.h>

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

// In PyTorch's words.
[[noreturn]] void refuse(std::string words) {
  throw Error(ErrorCode::invalid_argument, std::move(words));
}

double checked_scale(double scale) {
  // It is kept as float32, where neither it nor its inverse may be infinite.
  using Limits = std::numeric_limits<float>;
  if (scale >= Limits::min() && scale <= Limits::max()) return scale;
  refuse("a scale of " + std::to_string(scale) + ", expected a finite number above 0");
}

// The elements of the parameter's gradient, undefined when it has none.
at::Tensor values_of_gradient(const at::Tensor& parameter) {
  auto& gradient = parameter.mutable_grad();
  if (!gradient.defined()) return gradient;
  if (!gradient.is_sparse()) {
    make_plain(gradient);
    return gradient;
  }
  // Entries of one place may overflow float16 as a sum: they are added before the check.
  if (gradient.scalar_type() == at::kHalf) {
    gradient = gradient.to(at::kFloat).coalesce().to(at::kHalf);
  }
  return gradient._values();
}

// The kernel takes tensors of one device and dtype.
std::vector<std::vector<at::Tensor>> batches_of(const std::vector<at::Tensor>& parameters) {
  std::vector<std::vector<at::Tensor>> batches;
  for (const auto& parameter : parameters) {
    const auto values = values_of_gradient(parameter);
    if (!values.defined()) continue;
    const auto fits = [&](const std::vector<at::Tensor>& batch) {
      return batch.front().device() == values.device() &&
             batch.front().scalar_type() == values.scalar_type();
    };
    const auto found = std::find_if(batches.begin(), batches.end(), fits);
    auto& batch = found == batches.end() ? batches.emplace_back() : *found;
    batch.push_back(values);
  }
  return batches;
}

}  // namespace

struct ShardedGradScaler::Subject {
  const void* key = nullptr;
  std::vector<at::Tensor> parameters;
  std::function<void()> step;

  static Subject of(AdamW& optimizer) {
    Subject subject{&optimizer, {}, [&optimizer] { optimizer.step(); }};
    for (std::size_t group = 0; group < optimizer.group_count(); ++group) {
      for (const auto& parameter : optimizer.parameters(group)) {
        subject.parameters.push_back(parameter.local);
      }
    }
    return subject;
  }

  static Subject of(torch::optim::Optimizer& optimizer) {
    Subject subject{&optimizer, {}, [&optimizer] { optimizer.step(); }};
    for (const auto& group : optimizer.param_groups()) {
      const auto& parameters = group.params();
      subject.parameters.insert(subject.parameters.end(), parameters.begin(), parameters.end());
    }
    return subject;
  }
};

ShardedGradScaler::ShardedGradScaler(Mesh mesh, const GradScalerOptions& options)
    : mesh_(std::move(mesh)), options_(options) {
  if (!options_.enabled) return;
  if (!(options_.growth_factor > 1.0)) refuse("The growth factor must be > 1.0");
  if (!(options_.backoff_factor < 1.0)) refuse("The backoff factor must be < 1.0");
  const auto place = torch::TensorOptions(mesh_.device());
  scale_ = torch::full({}, checked_scale(options_.init_scale), place.dtype(torch::kFloat32));
  growth_tracker_ = torch::zeros({}, place.dtype(torch::kInt32));
}

ShardedGradScaler::ShardedGradScaler(const HybridMesh& mesh, const GradScalerOptions& options)
    : ShardedGradScaler(mesh.all, options) {}

void ShardedGradScaler::require_scaled(const char* method) const {
  if (scaled_) return;
  refuse(std::string("Attempted ") + method +
         " but _scale is None. This may indicate your script did not use scaler.scale(loss or "
         "outputs) earlier in the iteration");
}

at::Tensor ShardedGradScaler::scale(const at::Tensor& output) {
  if (!options_.enabled) return output;
  scaled_ = true;
  return (output * scale_.to(output.device())).to(output.scalar_type());
}

std::vector<at::Tensor> ShardedGradScaler::scale(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> scaled;
  for (const auto& output : outputs) scaled.push_back(scale(output));
  return scaled;
}

at::Tensor ShardedGradScaler::unscale_all(const std::vector<at::Tensor>& parameters) {
  const torch::NoGradGuard no_grad;
  // In float64, as PyTorch: a float32 reciprocal depends on the compiler's options.
  const auto inverse = scale_.to(torch::kFloat64).reciprocal().to(torch::kFloat32);
  auto found_inf = torch::zeros({1}, inverse.options());
  for (const auto& batch : batches_of(parameters)) {
    auto found_here = torch::zeros({1}, inverse.options().device(batch.front().device()));
    at::_amp_foreach_non_finite_check_and_unscale_(batch, found_here,
                                                   inverse.to(batch.front().device()));
    found_inf.add_(found_here.to(found_inf.device()));
  }
  // One sum for all devices of this rank, so that ranks without gradients somewhere take part too.
  mesh_.all_reduce_sum(found_inf);
  found_inf_ = found_inf_.defined() ? found_inf_ + found_inf : found_inf;
  return found_inf;
}

void ShardedGradScaler::unscale_once(const Subject& subject) {
  if (!options_.enabled) return;
  require_scaled("unscale_");
  const auto before = checks_.find(subject.key);
  if (before != checks_.end()) {
    refuse(before->second.stepped
               ? "unscale_() is being called after step()"
               : "unscale_() has already been called on this optimizer since the last update()");
  }
  checks_[subject.key].found_inf = unscale_all(subject.parameters);
}

void ShardedGradScaler::unscale(AdamW& optimizer) {
  unscale_once(Subject::of(optimizer));
}
void ShardedGradScaler::unscale(torch::optim::Optimizer& optimizer) {
  unscale_once(Subject::of(optimizer));
}

bool ShardedGradScaler::unscale(const std::vector<ShardedParameter>& parameters) {
  if (!options_.enabled) return true;
  require_scaled("unscale_");
  for (const auto& parameter : parameters) {
    if (checks_.contains(parameter.local.unsafeGetTensorImpl())) {
      throw Error(ErrorCode::invalid_argument,
                  "unscale_() has already been called on this parameter since the last update()")
          .at_key(parameter.name());
    }
  }
  const auto found_inf = unscale_all(local_tensors(parameters));
  for (const auto& parameter : parameters) {
    checks_[parameter.local.unsafeGetTensorImpl()].found_inf = found_inf;
  }
  return found_inf.item<float>() == 0;
}

bool ShardedGradScaler::step_once(const Subject& subject) {
  if (!options_.enabled) {
    subject.step();
    return true;
  }
  require_scaled("step");
  const auto before = checks_.find(subject.key);
  if (before == checks_.end()) {
    unscale_once(subject);
  } else if (before->second.stepped) {
    refuse("step() has already been called since the last update()");
  }
  auto& check = checks_.at(subject.key);
  const bool finite = check.found_inf.item<float>() == 0;
  if (finite) subject.step();
  check.stepped = true;
  return finite;
}

bool ShardedGradScaler::step(AdamW& optimizer) {
  return step_once(Subject::of(optimizer));
}
bool ShardedGradScaler::step(torch::optim::Optimizer& optimizer) {
  return step_once(Subject::of(optimizer));
}

void ShardedGradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  require_scaled("update");
  if (new_scale) {
    scale_.fill_(checked_scale(*new_scale));
  } else if (found_inf_.defined()) {
    at::_amp_update_scale_(scale_, growth_tracker_, found_inf_, options_.growth_factor,
                           options_.backoff_factor, options_.growth_interval);
  } else {
    refuse("No inf checks were recorded prior to update");
  }
  checks_.clear();
  found_inf_ = at::Tensor();
}

double ShardedGradScaler::get_scale() const {
  return options_.enabled ? scale_.item<double>() : 1.0;
}

Value ShardedGradScaler::state_dict() const {
  if (!options_.enabled) return Value::dict();
  return Value::dict({{"scale", get_scale()},
                      {"growth_factor", options_.growth_factor},
                      {"backoff_factor", options_.backoff_factor},
                      {"growth_interval", options_.growth_interval},
                      {"_growth_tracker", growth_tracker_.item<std::int64_t>()}});
}

void ShardedGradScaler::load_state_dict(const Value& state) {
  if (!options_.enabled) return;
  if (state.size() == 0) {
    refuse(
        "The source state dict is empty, possibly because it was saved from a disabled instance "
        "of GradScaler");
  }
  const double scale = checked_scale(state.at("scale").as_real());
  auto loaded = options_;
  loaded.growth_factor = state.at("growth_factor").as_real();
  loaded.backoff_factor = state.at("backoff_factor").as_real();
  loaded.growth_interval = state.at("growth_interval").as_int();
  const auto tracker = state.at("_growth_tracker").as_int();
  if (tracker < std::numeric_limits<std::int32_t>::min() ||
      tracker > std::numeric_limits<std::int32_t>::max()) {
    throw Error(ErrorCode::limit, "a count of " + std::to_string(tracker) + " leaves 32 bits")
        .at_key("_growth_tracker");
  }
  options_ = loaded;
  scale_.fill_(scale);
  growth_tracker_.fill_(tracker);
}

}  // namespace tessera
