#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <ostream>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/OpMathType.h>
#include <torch/torch.h>

#include "fsdp/unit/registry.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tessera/sync_batchnorm.h"
#include "torch/mesh_state.h"

namespace tessera {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The dtype in which statistics and sums of it are taken.
at::ScalarType wide_type(const torch::Tensor& input) {
  return at::toOpMathType(input.scalar_type());
}
torch::Tensor widened(const torch::Tensor& tensor, at::ScalarType type) {
  return tensor.defined() ? tensor.to(type) : tensor;
}

// All dimensions but that of the channels.
std::vector<std::int64_t> reduced_dimensions(const torch::Tensor& input) {
  std::vector<std::int64_t> dimensions{0};
  for (std::int64_t d = 2; d < input.dim(); ++d) dimensions.push_back(d);
  return dimensions;
}

// A number for each channel, as `input` has its channels.
torch::Tensor along_channels(const torch::Tensor& numbers, const torch::Tensor& input) {
  std::vector<std::int64_t> shape(static_cast<std::size_t>(input.dim()), 1);
  shape[1] = -1;
  return numbers.view(shape);
}

// Statistics of the values of a channel on all ranks, in double.
struct Statistics {
  torch::Tensor mean, variance;  // not corrected
  torch::Tensor count;           // one number
};

// An empty batch has the weight 0, and so has one that does not count: of these nothing is said,
// since zero times infinity is NaN.
Statistics statistics_of_all(const torch::Tensor& input, bool counts_here, const Mesh& mesh) {
  const auto channels = input.size(1);
  const auto options = input.options().dtype(at::kDouble).requires_grad(false);
  auto mine = torch::zeros({2 * channels + 1}, options);
  if (input.numel() > 0 && counts_here) {
    const auto [variance, mean] =
        torch::var_mean(input.to(wide_type(input)), reduced_dimensions(input), /*correction=*/0);
    const auto count = static_cast<double>(input.numel() / channels);
    mine = torch::cat(
        {mean.to(at::kDouble), variance.to(at::kDouble), torch::full({1}, count, options)});
  }
  const auto all = torch::stack(all_gather(mine, mesh));
  const auto means = all.narrow(1, 0, channels), variances = all.narrow(1, channels, channels);
  const auto counts = all.narrow(1, 2 * channels, 1);
  Statistics total;
  total.count = counts.sum();
  const auto divisor = total.count.clamp_min(1);
  total.mean = (means * counts).sum(0) / divisor;
  total.variance = ((variances + (means - total.mean).square()) * counts).sum(0) / divisor;
  return total;
}

[[noreturn]] void throw_single() {
  throw Error(ErrorCode::invalid_argument,
              "SyncBatchNorm in training: all ranks together have one value per channel");
}

// `running` stays as it is if there are no values.
void blend(const torch::Tensor& running, const torch::Tensor& fresh, const torch::Tensor& count,
           double factor) {
  const auto old = running.to(at::kDouble);
  running.copy_(torch::where(count > 0, old * (1 - factor) + fresh * factor, old));
}

struct Normalization {
  Statistics all;
  double eps;
  bool counts;  // the batch of this rank, in the statistics
  Mesh mesh;
};

// Normalizes by the statistics of all ranks, on which all of their inputs depend.
struct NormalizeTogether : torch::autograd::Function<NormalizeTogether> {
  using Optional = std::optional<torch::Tensor>;  // autograd wants to know of undefined ones
  static torch::Tensor forward(AutogradContext* context, const torch::Tensor& input,
                               const Optional& given_weight, const Optional& given_bias,
                               const Normalization& by);
  static variable_list backward(AutogradContext* context, const variable_list& gradients);
};

torch::Tensor NormalizeTogether::forward(AutogradContext* context, const torch::Tensor& input,
                                         const Optional& given_weight, const Optional& given_bias,
                                         const Normalization& by) {
  const auto& all = by.all;
  const auto weight = given_weight.value_or(torch::Tensor());
  const auto bias = given_bias.value_or(torch::Tensor());
  const auto type = wide_type(input);
  const auto mean = all.mean.to(type);
  context->save_for_backward(
      {input, weight, mean, (all.variance + by.eps).rsqrt().to(type), all.count});
  context->saved_data["input"] = input.requires_grad();
  context->saved_data["counts"] = by.counts;
  context->saved_data["bias"] = bias.defined() ? c10::IValue(bias.scalar_type()) : c10::IValue();
  save_mesh(*context, by.mesh);
  if (input.numel() == 0) return torch::empty_like(input);
  return std::get<0>(at::native_batch_norm(input, widened(weight, type), widened(bias, type), mean,
                                           all.variance.to(type), /*training=*/false,
                                           /*momentum=*/0, by.eps));
}

variable_list NormalizeTogether::backward(AutogradContext* context,
                                          const variable_list& gradients) {
  if (torch::GradMode::is_enabled()) {
    throw Error(ErrorCode::unsupported,
                "a backward with create_graph went through SyncBatchNorm, whose gradients have no "
                "history");
  }
  const auto saved = context->get_saved_variables();
  const auto &input = saved[0], &weight = saved[1], &mean = saved[2], &invstd = saved[3];
  const auto type = wide_type(input);
  const auto gradient = gradients[0].to(type);
  const auto from_mean = input.to(type) - along_channels(mean, input);
  const auto dimensions = reduced_dimensions(input);
  auto sums = torch::stack({gradient.sum(dimensions), (gradient * from_mean).sum(dimensions)});
  variable_list results(4);
  if (weight.defined()) results[1] = (sums[1] * invstd).to(weight.scalar_type());
  if (const auto& bias = context->saved_data["bias"]; !bias.isNone())
    results[2] = sums[0].to(bias.toScalarType());
  if (!context->saved_data["input"].toBool()) return results;
  // The gradient of the bias is a part of it.
  sums = context->saved_data["counts"].toBool() ? sums.clone() : torch::zeros_like(sums);
  saved_mesh(*context).all_reduce_sum(sums);
  const auto means = sums / saved[4].clamp_min(1).to(type);
  const auto scale = weight.defined() ? invstd * weight.to(type) : invstd;
  const auto slope = along_channels(invstd.square() * means[1], input);
  results[0] = ((gradient - along_channels(means[0], input) - from_mean * slope) *
                along_channels(scale, input))
                   .to(input.scalar_type());
  return results;
}

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& chosen, const Mesh& mesh)
    : SyncBatchNormImpl(chosen) {
  set_mesh(mesh);
}

SyncBatchNormImpl::SyncBatchNormImpl(const torch::nn::BatchNormOptions& chosen) : options(chosen) {
  SyncBatchNormImpl::reset();
}

void SyncBatchNormImpl::reset() {
  const auto channels = options.num_features();
  const auto none = torch::Tensor();
  const bool affine = options.affine(), tracks = options.track_running_stats();
  enter(affine ? torch::empty({channels}).set_requires_grad(true) : none,
        affine ? torch::empty({channels}).set_requires_grad(true) : none,
        tracks ? torch::empty({channels}) : none, tracks ? torch::empty({channels}) : none,
        tracks ? torch::empty({}, torch::kLong) : none);
  reset_parameters();
}

void SyncBatchNormImpl::enter(const torch::Tensor& scale, const torch::Tensor& shift,
                              const torch::Tensor& mean, const torch::Tensor& variance,
                              const torch::Tensor& count) {
  const auto wants = [](const torch::Tensor& p) { return p.defined() && p.requires_grad(); };
  weight = register_parameter("weight", scale, wants(scale));
  bias = register_parameter("bias", shift, wants(shift));
  running_mean = register_buffer("running_mean", mean);
  running_var = register_buffer("running_var", variance);
  num_batches_tracked = register_buffer("num_batches_tracked", count);
}

void SyncBatchNormImpl::reset_parameters() {
  reset_running_stats();
  if (!options.affine()) return;
  torch::nn::init::ones_(weight);
  torch::nn::init::zeros_(bias);
}

void SyncBatchNormImpl::reset_running_stats() {
  if (!options.track_running_stats()) return;
  running_mean.zero_();
  running_var.fill_(1);
  num_batches_tracked.zero_();
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "tessera::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ')';
}

torch::Tensor SyncBatchNormImpl::forward(const torch::Tensor& input) {
  require_input(input);
  if (!is_training()) return normalize_alone(input, 0);
  if (!mesh_) {
    throw Error(ErrorCode::invalid_argument,
                "a SyncBatchNorm has no mesh: convert_sync_batchnorm(model, mesh) gives it one");
  }
  if (mesh_->size() == 1 && input.numel() == input.size(1) && input.numel() > 0) throw_single();
  const auto factor = share_of_batch();
  const auto output =
      mesh_->size() == 1 ? normalize_alone(input, factor) : normalize_together(input, factor);
  // What throws is no batch.
  if (num_batches_tracked.defined()) num_batches_tracked += 1;
  return output;
}

void SyncBatchNormImpl::require_input(const torch::Tensor& input) const {
  const auto dimensions = input.dim();
  if (dimensions >= 2 && input.size(1) == options.num_features()) return;
  throw Error(ErrorCode::invalid_argument,
              dimensions < 2 ? "SyncBatchNorm expects at least 2 dimensions, and got " +
                                   std::to_string(dimensions)
                             : "SyncBatchNorm of " + std::to_string(options.num_features()) +
                                   " channels got " + std::to_string(input.size(1)));
}

// How much of the running statistics the next batch makes.
double SyncBatchNormImpl::share_of_batch() const {
  if (!num_batches_tracked.defined()) return 0;
  return options.momentum() ? *options.momentum() : 1.0 / (num_batches_tracked.item<double>() + 1);
}

torch::Tensor SyncBatchNormImpl::normalize_alone(const torch::Tensor& input, double factor) {
  namespace F = torch::nn::functional;
  const bool by_batch = is_training() || !running_mean.defined();
  std::array tensors{running_mean, running_var, weight, bias};
  const auto type = wide_type(input);
  bool are_wide = true, are_like_input = true;
  for (const auto& tensor : tensors) {
    if (!tensor.defined()) continue;
    are_wide = are_wide && tensor.scalar_type() == type;
    are_like_input = are_like_input && tensor.scalar_type() == input.scalar_type();
  }
  // libtorch's kernels take no other mixtures. What it updates has to be the buffers' own memory.
  if (!are_wide && !are_like_input) {
    if (is_training()) return normalize_together(input, factor);
    for (auto& tensor : tensors) tensor = widened(tensor, type);
  }
  const auto& [mean, variance, scale, shift] = tensors;
  return F::detail::batch_norm(input, mean, variance, scale, shift, by_batch, factor,
                               options.eps());
}

torch::Tensor SyncBatchNormImpl::normalize_together(const torch::Tensor& input, double factor) {
  Statistics all;
  {
    const torch::NoGradGuard no_grad;
    all = statistics_of_all(input.detach(), counts, *mesh_);
    // A device would have to be waited for.
    if (all.count.is_cpu() && all.count.item<double>() == 1) throw_single();
    if (running_mean.defined()) {
      const auto unbiased = all.variance * (all.count / (all.count - 1).clamp_min(1));
      blend(running_mean, all.mean, all.count, factor);
      blend(running_var, unbiased, all.count, factor);
    }
  }
  const auto given = [](const torch::Tensor& parameter) {
    return parameter.defined() ? NormalizeTogether::Optional(parameter) : std::nullopt;
  };
  return NormalizeTogether::apply(input, given(weight), given(bias),
                                  Normalization{all, options.eps(), counts, *mesh_});
}

namespace {

namespace nn = torch::nn;

template <typename Use, typename... Impls>
bool use_as(nn::Module& module, const Use& use) {
  const auto use_one = [&](auto* norm) {
    if (norm != nullptr) use(*norm);
    return norm != nullptr;
  };
  return (use_one(dynamic_cast<Impls*>(&module)) || ...);
}

// Calls `use` with the BatchNorm that `module` is; false: it is none.
template <typename Use>
bool use_batch_norm(nn::Module& module, const Use& use) {
  return use_as<Use, nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl>(module, use);
}

// A class derived from libtorch's may have a forward of its own.
bool is_just_batch_norm(nn::Module& module) {
  bool is_just = false;
  use_batch_norm(module, [&](const auto& norm) {
    is_just = typeid(module) == typeid(std::decay_t<decltype(norm)>);
  });
  return is_just;
}

// What is there is found first, and changed when all of it can be.
class Conversion {
 public:
  Conversion(nn::Module& top, const Mesh& mesh) : mesh_(mesh) {
    require_no_units(top);
    look_at(top, "", nullptr);
    if (!refused_.empty()) refuse();
  }

  void apply() {
    for (auto* sync : there_) sync->set_mesh(mesh_);
    for (const auto& entry : entries_) exchange(entry);
  }

 private:
  struct SequentialEntry {
    nn::SequentialImpl& parent;
    std::string key;
    std::shared_ptr<nn::Module> norm;
  };

  static void require_no_units(const nn::Module& top) {
    for (const auto& parameter : top.named_parameters()) {
      if (!detail::find_owner(parameter.value()).unit) continue;
      throw Error(ErrorCode::invalid_argument,
                  "convert_sync_batchnorm comes before fully_shard and replicate: this parameter "
                  "belongs to a unit")
          .at_key(parameter.key());
    }
  }

  void look_at(nn::Module& module, const std::string& name, const SequentialEntry* entry) {
    if (auto* sync = dynamic_cast<SyncBatchNormImpl*>(&module)) {
      there_.push_back(sync);
    } else if (use_batch_norm(module, [](const auto&) {})) {
      if (entry != nullptr && is_just_batch_norm(module)) {
        entries_.push_back(*entry);
      } else {
        refused_.push_back(name);
      }
    } else {
      look_below(module, name.empty() ? name : name + ".");
    }
  }

  void look_below(nn::Module& module, const std::string& prefix) {
    auto* parent = dynamic_cast<nn::SequentialImpl*>(&module);
    for (const auto& child : module.named_children()) {
      // A class of the program's own may have others beside what its slots call.
      const auto is_called = [&](const nn::AnyModule& slot) { return slot.ptr() == child.value(); };
      if (parent == nullptr || !std::ranges::any_of(*parent, is_called)) {
        look_at(*child.value(), prefix + child.key(), nullptr);
      } else {
        const SequentialEntry entry{*parent, child.key(), child.value()};
        look_at(*child.value(), prefix + child.key(), &entry);
      }
    }
  }

  [[noreturn]] void refuse() const {
    const auto others = refused_.size() - 1;
    throw Error(ErrorCode::unsupported,
                "a BatchNorm that is no entry of a torch::nn::Sequential, or of a class of its "
                "own, cannot be exchanged" +
                    (others == 0 ? "" : " (and " + std::to_string(others) + " more)") +
                    ": declare it as tessera::SyncBatchNorm")
        .at_key(refused_.front());
  }

  void exchange(const SequentialEntry& entry) {
    auto& made = made_[entry.norm.get()];
    if (!made) {
      use_batch_norm(*entry.norm, [&](const auto& norm) {
        made = std::make_shared<SyncBatchNormImpl>(norm, mesh_);
      });
    }
    entry.parent.replace_module(entry.key, made);
    for (auto& slot : entry.parent) {
      if (slot.ptr() == entry.norm) slot = nn::AnyModule(made);
    }
  }

  const Mesh& mesh_;
  std::vector<SyncBatchNormImpl*> there_;
  std::vector<SequentialEntry> entries_;
  std::vector<std::string> refused_;
  std::unordered_map<const nn::Module*, std::shared_ptr<SyncBatchNormImpl>> made_;
};

}  // namespace

void convert_sync_batchnorm(torch::nn::Module& module, const Mesh& mesh) {
  Conversion(module, mesh).apply();
}

}  // namespace tessera
