// How long does a training step take, and how often does it start kernels and wait for the device?
// Beside bench/peers/train_step.py, which has the same models, on whatever device the mesh is:
//   bench_step --sharding fsdp2|flat|none --block gpt|llama --shape
//   dim,layers,heads,seq,batch,vocabulary
// Prints the median of windows of steps, each of which ends with a wait for the device.
#include <ATen/DeviceAccelerator.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/profiler_kineto.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <exception>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "measure.h"
#include "tessera/fsdp.h"
#include "tessera/mesh.h"
#include "tessera/optim.h"

namespace {

namespace nn = torch::nn;
using tessera::bench::now;
using torch::Tensor;

struct Config {
  std::string sharding = "fsdp2";
  std::string block = "gpt";
  std::vector<std::int64_t> shape{256, 8, 8, 128, 4, 256};
  bool bf16 = false;
  double clip = 0;
  int windows = 5;
  int steps = 4;  // of a window
  bool profile = false;

  [[nodiscard]] std::int64_t dim() const { return shape[0]; }
  [[nodiscard]] std::int64_t layers() const { return shape[1]; }
  [[nodiscard]] std::int64_t heads() const { return shape[2]; }
  [[nodiscard]] std::int64_t seq() const { return shape[3]; }
  [[nodiscard]] std::int64_t batch() const { return shape[4]; }
  [[nodiscard]] std::int64_t vocabulary() const { return shape[5]; }
};

// [batch, seq, heads * width] -> [batch, heads, seq, width]
Tensor by_heads(const Tensor& x, std::int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, -1}).transpose(1, 2);
}

Tensor joined(const Tensor& x) {
  return x.transpose(1, 2).reshape({x.size(0), x.size(2), -1});
}

// A layer with weights that are drawn on the device: a billion on the CPU would take minutes.
struct LinearImpl : nn::Module {
  LinearImpl(std::int64_t in, std::int64_t out, torch::Device device, bool biased = true)
      : weight(register_parameter("weight", torch::empty({out, in}, device).normal_(0, 0.02))) {
    if (biased) bias = register_parameter("bias", torch::zeros({out}, device));
  }
  Tensor forward(const Tensor& x) { return torch::linear(x, weight, bias); }
  Tensor weight, bias;
};
TORCH_MODULE(Linear);

struct EmbeddingImpl : nn::Module {
  EmbeddingImpl(std::int64_t count, std::int64_t dim, torch::Device device)
      : weight(register_parameter("weight", torch::empty({count, dim}, device).normal_(0, 0.02))) {}
  Tensor forward(const Tensor& indices) { return torch::embedding(weight, indices); }
  Tensor weight;
};
TORCH_MODULE(Embedding);

struct RmsNormImpl : nn::Module {
  explicit RmsNormImpl(std::int64_t dim)
      : weight(register_parameter("weight", torch::ones({dim}))) {}
  Tensor forward(const Tensor& x) { return at::rms_norm(x, weight.sizes(), weight, 1e-5); }
  Tensor weight;
};
TORCH_MODULE(RmsNorm);

// A block of GPT-2, or one of the shape of Llama 3: a key and a value for four queries, 3.5 times
// as wide inside. Positions are left out.
struct BlockImpl : nn::Module {
  BlockImpl(const Config& config, torch::Device device)
      : heads(config.heads()), is_llama(config.block == "llama") {
    const std::int64_t dim = config.dim();
    const auto linear = [&](const char* name, std::int64_t from, std::int64_t to) {
      return register_module(name, Linear(from, to, device, !is_llama));
    };
    out = linear("out", dim, dim);
    if (is_llama) {
      const std::int64_t inside = dim * 7 / 2, shared = dim / 4;
      norm1 = register_module("norm1", RmsNorm(dim));
      norm2 = register_module("norm2", RmsNorm(dim));
      q = linear("q", dim, dim), k = linear("k", dim, shared), v = linear("v", dim, shared);
      gate = linear("gate", dim, inside), up = linear("up", dim, inside);
      down = linear("down", inside, dim);
    } else {
      ln1 = register_module("ln1", nn::LayerNorm(std::vector<std::int64_t>{dim}));
      ln2 = register_module("ln2", nn::LayerNorm(std::vector<std::int64_t>{dim}));
      qkv = linear("qkv", dim, 3 * dim), up = linear("up", dim, 4 * dim);
      down = linear("down", 4 * dim, dim);
    }
  }

  Tensor forward(Tensor x) {
    if (is_llama) {
      const auto y = norm1(x);
      x = x + out(joined(torch::scaled_dot_product_attention(
                  by_heads(q(y), heads), by_heads(k(y), heads / 4), by_heads(v(y), heads / 4), {},
                  0.0, true, std::nullopt, /*enable_gqa=*/true)));
      const auto z = norm2(x);
      return x + down(torch::silu(gate(z)) * up(z));
    }
    const auto parts = qkv(ln1(x)).view({x.size(0), x.size(1), 3, heads, -1});
    const auto each = parts.permute({2, 0, 3, 1, 4}).unbind(0);
    x = x +
        out(joined(torch::scaled_dot_product_attention(each[0], each[1], each[2], {}, 0.0, true)));
    return x + down(torch::gelu(up(ln2(x))));
  }

  std::int64_t heads;
  bool is_llama;
  nn::LayerNorm ln1{nullptr}, ln2{nullptr};
  RmsNorm norm1{nullptr}, norm2{nullptr};
  Linear qkv{nullptr}, q{nullptr}, k{nullptr}, v{nullptr}, out{nullptr}, gate{nullptr};
  Linear up{nullptr}, down{nullptr};
};
TESSERA_MODULE(Block);

struct GptImpl : nn::Module {
  GptImpl(const Config& config, torch::Device device)
      : wte(register_module("wte", Embedding(config.vocabulary(), config.dim(), device))),
        wpe(register_module("wpe", Embedding(config.seq(), config.dim(), device))) {
    const auto list = register_module("h", nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers(); ++i) {
      blocks.emplace_back(config, device);
      list->push_back(blocks.back().ptr());
    }
    ln = register_module("ln", nn::LayerNorm(std::vector<std::int64_t>{config.dim()}));
    head = register_module("head", Linear(config.dim(), config.vocabulary(), device));
  }
  Tensor forward(const Tensor& tokens) {
    Tensor x = wte(tokens) + wpe(torch::arange(tokens.size(1), tokens.options()));
    for (Block& block : blocks) x = block(x);
    return head(ln(x));
  }

  Embedding wte, wpe;
  std::vector<Block> blocks;
  nn::LayerNorm ln{nullptr};
  Linear head{nullptr};
};
TESSERA_MODULE(Gpt);

Gpt build(const Config& config, const tessera::Mesh& mesh) {
  torch::manual_seed(0);
  Gpt model(config, mesh.device());
  model->to(mesh.device());
  if (config.sharding == "none") return model;
  tessera::ShardOptions options;
  if (config.sharding == "flat") options.layout = tessera::ShardLayout::flat;
  if (config.bf16) {
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  for (Block& block : model->blocks) tessera::fully_shard(block, mesh, options);
  tessera::fully_shard(model, mesh, options);
  return model;
}

void wait_for(torch::Device device) {
  if (!device.is_cpu()) at::accelerator::synchronizeDevice(device.index());
}

// The peak of the device where there is one, else of the process.
double peak_mb(torch::Device device) {
  if (device.is_cpu()) return static_cast<double>(tessera::bench::peak_memory());
  const auto stats = at::accelerator::getDeviceStats(device.index());
  return static_cast<double>(stats.allocated_bytes[0].peak) / 1e6;
}

// What a thread of the host asked of CUDA in one step.
void print_profile(const std::function<void()>& step, torch::Device device) {
  namespace profiler = torch::autograd::profiler;
  using torch::profiler::impl::ActivityType;
  std::set<ActivityType> activities{ActivityType::CPU};
  if (!device.is_cpu()) activities.insert(ActivityType::CUDA);
  const profiler::ProfilerConfig config(torch::profiler::impl::ProfilerState::KINETO);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
  step();
  const auto result = profiler::disableProfiler();
  int launches = 0, copies = 0, waits = 0, operators = 0;
  for (const auto& event : result->events()) {
    if (event.deviceType() != torch::kCPU) continue;
    const std::string name = event.name();
    if (name.find("LaunchKernel") != std::string::npos) ++launches;
    if (name.starts_with("cudaMemcpy") || name.starts_with("cudaMemset")) ++copies;
    if (name.starts_with("cuda") && name.find("Synchronize") != std::string::npos) ++waits;
    if (name.starts_with("aten::")) ++operators;
  }
  std::printf("launches %d copies %d waits %d operators %d\n", launches, copies, waits, operators);
}

void measure(const Config& config) {
  const auto mesh = tessera::Mesh::from_environment();
  const auto device = mesh.device();
  Gpt model = build(config, mesh);
  const auto parameters = tessera::sharded_parameters(model);
  tessera::AdamW optimizer(parameters);
  // Unsharded, weights stay float32 and matrix products cast them.
  const bool autocast = config.bf16 && config.sharding == "none";
  at::autocast::set_autocast_enabled(device.type(), autocast);
  at::autocast::set_autocast_dtype(device.type(), torch::kBFloat16);
  const auto tokens =
      torch::randint(config.vocabulary(), {config.batch(), config.seq() + 1}, torch::kLong)
          .to(device);
  const auto inputs = tokens.slice(1, 0, -1), targets = tokens.slice(1, 1).reshape(-1);
  const auto step = [&] {
    const auto logits = model(inputs).view({-1, config.vocabulary()});
    torch::cross_entropy_loss(logits, targets).backward();
    if (autocast) at::autocast::clear_cache();
    if (config.clip > 0) tessera::clip_grad_norm(parameters, config.clip);
    optimizer.step();
    optimizer.zero_grad();
  };
  std::vector<double> times;
  for (int window = -1; window < config.windows; ++window) {  // the first one warms up
    wait_for(device);
    const double begin = now();
    for (int i = 0; i < config.steps; ++i) step();
    wait_for(device);
    if (window >= 0) times.push_back(1000 * (now() - begin) / config.steps);
  }
  std::ranges::sort(times);
  if (mesh.rank() == 0)
    std::printf("ms/step %.3f\npeak_mb %.0f\n", times[times.size() / 2], peak_mb(device));
  if (config.profile && mesh.rank() == 0) print_profile(step, device);
}

}  // namespace

int main(int argc, char** argv) {
  Config config;
  CLI::App app("Times training steps");
  app.add_option("--sharding", config.sharding)->check(CLI::IsMember({"fsdp2", "flat", "none"}));
  app.add_option("--block", config.block)->check(CLI::IsMember({"gpt", "llama"}));
  app.add_option("--shape", config.shape, "dim,layers,heads,seq,batch,vocabulary")
      ->delimiter(',')
      ->expected(6);
  app.add_flag("--bf16", config.bf16);
  app.add_option("--clip", config.clip);
  app.add_option("--windows", config.windows)->check(CLI::PositiveNumber);
  app.add_option("--steps", config.steps, "Of a window")->check(CLI::PositiveNumber);
  app.add_flag("--profile", config.profile, "Count launches and waits of one step; one rank");
  CLI11_PARSE(app, argc, argv);
  try {
    measure(config);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 1;
  }
}
