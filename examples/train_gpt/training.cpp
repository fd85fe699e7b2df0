#include "training.h"

#include <ATen/autocast_mode.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/norms.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace {

constexpr std::int64_t kValidationWindows = 64;

// Within its life matrix products run in bf16 while weights, gradients and the optimizer stay fp32.
class ComputePrecision {
 public:
  explicit ComputePrecision(Precision precision, torch::DeviceType device)
      : device_(device), was_enabled_(at::autocast::is_autocast_enabled(device)) {
    at::autocast::set_autocast_enabled(device, precision == Precision::bf16);
    at::autocast::set_autocast_dtype(device, torch::kBFloat16);
    // A cache of converted weights would outlive the unit they belong to.
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~ComputePrecision() { at::autocast::set_autocast_enabled(device_, was_enabled_); }
  ComputePrecision(const ComputePrecision&) = delete;
  ComputePrecision& operator=(const ComputePrecision&) = delete;

 private:
  torch::DeviceType device_;
  bool was_enabled_;
};

Gpt build(const Options& o, const tessera::Mesh& mesh) {
  Gpt model = make_gpt({o.dim, o.layers, o.heads, o.seq, o.tied}, o.seed);
  model->to(mesh.device());
  switch (o.sharding) {
    case Sharding::fsdp2: {
      tessera::ShardOptions options;
      if (o.flat) options.layout = tessera::ShardLayout::flat;
      for (Block& block : model->blocks) tessera::fully_shard(block, mesh, options);
      tessera::fully_shard(model, mesh, options);
      return model;
    }
    case Sharding::fsdp1:
      return tessera::FullyShardedDataParallel<Gpt>(
                 model, mesh,
                 {.auto_wrap_policy = tessera::module_wrap_policy<BlockImpl>(),
                  .use_orig_params = true})
          .module();
    case Sharding::ddp:
      return tessera::DistributedDataParallel<Gpt>(model, mesh).module();
    case Sharding::none:
      break;
  }
  return model;
}

tessera::AdamWOptions adamw_options(const Options& o) {
  return {.lr = o.lr, .beta2 = 0.95, .weight_decay = o.weight_decay};
}

// Weight decay shrinks matrices and embeddings, not biases and not LayerNorm.
tessera::AdamW make_optimizer(const std::vector<tessera::ShardedParameter>& parameters,
                              const Options& o) {
  tessera::AdamWOptions options = adamw_options(o);
  tessera::ParameterGroup decayed{{}, options};
  options.weight_decay = 0;
  tessera::ParameterGroup kept{{}, options};
  for (const auto& parameter : parameters) {
    auto& group = parameter.shape.size() >= 2 ? decayed : kept;
    group.parameters.push_back(parameter);
  }
  return tessera::AdamW({decayed, kept});
}

torch::Tensor stacked(const std::vector<Text::Window>& windows, torch::Device device) {
  const auto length = static_cast<std::int64_t>(windows.front().size());
  auto rows = torch::empty({static_cast<std::int64_t>(windows.size()), length}, torch::kLong);
  auto* out = rows.data_ptr<std::int64_t>();
  for (const Text::Window& window : windows) out = std::copy(window.begin(), window.end(), out);
  return rows.to(device);
}

}  // namespace

Training::Training(const Options& options, const tessera::Mesh& mesh)
    : options_(options),
      mesh_(mesh),
      model_(build(options, mesh)),
      parameters_(tessera::sharded_parameters(model_)),
      optimizer_(make_optimizer(parameters_, options)) {}

void Training::regroup(const Groups& groups) {
  std::map<std::string, tessera::ShardedParameter> unused;
  for (const auto& parameter : parameters_) unused.emplace(parameter.name(), parameter);
  std::vector<tessera::ParameterGroup> regrouped;
  for (const auto& names : groups) {
    regrouped.push_back({{}, adamw_options(options_)});
    for (const std::string& name : names) {
      const auto node = unused.extract(name);
      if (!node) {
        throw tessera::Error(
            tessera::ErrorCode::mismatch,
            "the optimizer's groups name a parameter that the model lacks, or twice")
            .at_key(name);
      }
      regrouped.back().parameters.push_back(node.mapped());
    }
  }
  if (!unused.empty()) {
    throw tessera::Error(tessera::ErrorCode::mismatch,
                         "the optimizer's groups lack a parameter of the model")
        .at_key(unused.begin()->first);
  }
  optimizer_ = tessera::AdamW(std::move(regrouped));
}

torch::Tensor Training::logits(const torch::Tensor& bytes) {
  const ComputePrecision precision(options_.dtype, mesh_.device().type());
  return model_(bytes).to(torch::kFloat);
}

torch::Tensor Training::loss_sum(const torch::Tensor& windows) {
  const auto inputs = windows.slice(1, 0, -1);
  const auto targets = windows.slice(1, 1).reshape(-1);
  return torch::cross_entropy_loss(logits(inputs).view({-1, kVocabulary}), targets, {},
                                   at::Reduction::Sum);
}

StepResult Training::step(const Text& text, std::int64_t done, double lr) {
  const double tokens = static_cast<double>(options_.batch * options_.seq);
  const Share mine = share_of(options_.batch, mesh_.rank(), mesh_.size());
  // Read when the whole step is queued: a number of a device waits for what comes before it.
  std::vector<torch::Tensor> losses;
  for (std::int64_t micro = 0; micro < options_.accumulate; ++micro) {
    const Share part = share_of(mine.size(), micro, options_.accumulate);
    std::vector<Text::Window> windows;
    for (std::int64_t i = part.begin; i < part.end; ++i) {
      windows.push_back(text.training(done, mine.begin + i));
    }
    // A rank with nothing to do still takes part in the collectives, with a window that counts
    // nothing.
    const double weight = windows.empty() ? 0 : 1 / tokens;
    if (windows.empty()) windows.push_back(text.training(done, 0));

    const auto sum = loss_sum(stacked(windows, mesh_.device())) * weight;
    // Sharding averages gradients over the ranks; the loss is a sum over them.
    (sum * mesh_.size()).backward();
    losses.push_back(sum.detach());
  }
  torch::Tensor grad_norm;
  if (options_.clip > 0) grad_norm = tessera::clip_grad_norm_(parameters_, options_.clip);
  optimizer_.set_lr(lr);
  optimizer_.step();
  optimizer_.zero_grad();
  double loss = 0;
  for (const auto& part : losses) loss += part.item<double>();
  StepResult result{.loss = mesh_.all_reduce_sum(loss)};
  if (grad_norm.defined()) result.grad_norm = grad_norm.item<double>();
  return result;
}

double Training::validate(const Text& text) {
  const torch::NoGradGuard no_grad;
  const Share mine = share_of(kValidationWindows, mesh_.rank(), mesh_.size());
  const std::int64_t rounds = (kValidationWindows - 1) / mesh_.size() / options_.batch + 1;
  double sum = 0;
  for (std::int64_t round = 0; round < rounds; ++round) {
    const Share part = share_of(mine.size(), round, rounds);
    std::vector<Text::Window> windows;
    for (std::int64_t i = part.begin; i < part.end; ++i) {
      windows.push_back(text.validation(mine.begin + i, kValidationWindows));
    }
    const bool counts = !windows.empty();
    if (!counts) windows.push_back(text.validation(0, kValidationWindows));
    const double loss = loss_sum(stacked(windows, mesh_.device())).item<double>();
    if (counts) sum += loss;
  }
  return mesh_.all_reduce_sum(sum) / static_cast<double>(kValidationWindows * options_.seq);
}

std::string Training::sample(std::int64_t count) {
  constexpr double kTemperature = 0.8;
  const torch::NoGradGuard no_grad;
  torch::manual_seed(options_.seed);  // every rank draws the same bytes
  std::string text = "\n";
  while (static_cast<std::int64_t>(text.size()) <= count) {
    const std::string context =
        text.substr(text.size() - std::min<std::size_t>(text.size(), options_.seq));
    const Text::Window window(reinterpret_cast<const std::uint8_t*>(context.data()),
                              context.size());
    const auto next = logits(stacked({window}, mesh_.device()))[0][-1].cpu();
    const auto drawn = torch::multinomial((next / kTemperature).softmax(0), 1);
    text.push_back(static_cast<char>(drawn.item<std::int64_t>()));
  }
  return text.substr(1);
}
