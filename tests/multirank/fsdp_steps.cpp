// One rank of trainings beside PyTorch's: prints the loss and the gradient norm of each step.
//   torchrun --no-python fsdp_steps DIR MODE...
// MODE is KIND.OPTIMIZER: fsdp2, fsdp2_bf16, fsdp1, fsdp1_orig, fsdp1_zero2 or ddp; sgd or adamw.
// DIR/weights holds the initial parameters in the order of named_parameters() as float32,
// DIR/tokens int64 [steps, world, 2, 7]. The rank writes for each mode DIR/MODE.ours.RANK,
// DIR/MODE.shard.RANK (its shards before the first step, one after the other) and, rank 0,
// DIR/MODE.final (all parameters after the last).
#include <torch/torch.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <optional>
#include <string>
#include <vector>

#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"

namespace {

namespace nn = torch::nn;

constexpr std::int64_t kVocabulary = 17, kWidth = 10, kHidden = 13, kRows = 2, kLength = 7,
                       kSteps = 10;

struct BlockImpl : nn::Module {
  nn::LayerNorm ln{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  BlockImpl() {
    ln = register_module("ln", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    up = register_module("up", nn::Linear(kWidth, kHidden));
    down = register_module("down", nn::Linear(kHidden, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(ln(x)))); }
};
TESSERA_MODULE(Block);

struct NetImpl : nn::Module {
  nn::Embedding wte{nullptr};
  nn::ModuleList h;
  nn::LayerNorm ln{nullptr};
  nn::Linear head{nullptr};
  NetImpl() {
    wte = register_module("wte", nn::Embedding(kVocabulary, kWidth));
    h = register_module("h", nn::ModuleList(Block(), Block(), Block()));
    ln = register_module("ln", nn::LayerNorm(nn::LayerNormOptions({kWidth})));
    head = register_module("head", nn::Linear(kWidth, kVocabulary));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = wte(tokens);
    for (std::size_t i = 0; i < h->size(); ++i) x = Block(h->ptr<BlockImpl>(i))(x);
    return head(ln(x));
  }
};
TESSERA_MODULE(Net);

void read_into(std::ifstream& file, const torch::Tensor& tensor) {
  file.read(static_cast<char*>(tensor.mutable_data_ptr()),
            static_cast<std::streamsize>(tensor.nbytes()));
  if (!file) throw tessera::Error(tessera::ErrorCode::incomplete, "the input file is too short");
}

Net shard(Net net, const std::string& kind, const tessera::Mesh& mesh) {
  if (kind == "ddp") return tessera::DistributedDataParallel<Net>(net, mesh).module();
  if (kind.starts_with("fsdp1")) {
    tessera::FullyShardedOptions options;
    options.auto_wrap_policy = tessera::module_wrap_policy<BlockImpl>();
    options.use_orig_params = kind == "fsdp1_orig";
    if (kind == "fsdp1_zero2") options.sharding_strategy = tessera::ShardingStrategy::shard_grad_op;
    return tessera::FullyShardedDataParallel<Net>(net, mesh, options).module();
  }
  tessera::ShardOptions options;
  if (kind == "fsdp2_bf16") {
    options.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat};
  }
  for (std::size_t i = 0; i < net->h->size(); ++i)
    tessera::fully_shard(net->h->ptr<BlockImpl>(i), mesh, options);
  tessera::fully_shard(net, mesh, options);
  return net;
}

void write_bytes(std::ofstream& file, const torch::Tensor& tensor) {
  const auto whole = tensor.detach().to(torch::kFloat).contiguous();
  file.write(static_cast<const char*>(whole.const_data_ptr()),
             static_cast<std::streamsize>(whole.nbytes()));
}

// Either optimizer behind one face.
struct Optimizer {
  std::optional<tessera::AdamW> adamw;
  std::optional<torch::optim::SGD> sgd;
  Optimizer(const std::vector<tessera::ShardedParameter>& parameters, bool is_sgd) {
    if (is_sgd) {
      sgd.emplace(tessera::local_tensors(parameters), torch::optim::SGDOptions(0.1).momentum(0.9));
    } else {
      adamw.emplace(parameters, tessera::AdamWOptions{.lr = 1e-2, .weight_decay = 0.1});
    }
  }
  void step() {
    if (sgd) {
      sgd->step();
      sgd->zero_grad();
    } else {
      adamw->step();
      adamw->zero_grad();
    }
  }
};

void train(const std::string& directory, const std::string& mode, const tessera::Mesh& mesh) {
  Net net;
  std::ifstream weights(directory + "/weights", std::ios::binary);
  for (const auto& parameter : net->parameters()) read_into(weights, parameter.detach());
  auto tokens = torch::empty({kSteps, mesh.size(), kRows, kLength}, torch::kInt64);
  std::ifstream token_file(directory + "/tokens", std::ios::binary);
  read_into(token_file, tokens);

  const auto dot = mode.find('.');
  net = shard(net, mode.substr(0, dot), mesh);
  const auto parameters = tessera::sharded_parameters(net);
  const auto rank = std::to_string(mesh.rank());
  {
    std::ofstream shards(directory + "/" + mode + ".shard." + rank, std::ios::binary);
    for (const auto& parameter : parameters) write_bytes(shards, parameter.local);
  }
  Optimizer optimizer(parameters, mode.substr(dot + 1) == "sgd");
  std::FILE* out = std::fopen((directory + "/" + mode + ".ours." + rank).c_str(), "w");
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto batch = tokens[step][mesh.rank()];
    const auto logits = net(batch.narrow(1, 0, kLength - 1)).to(torch::kFloat);
    auto loss = torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}),
                                          batch.narrow(1, 1, kLength - 1).reshape({-1}));
    loss.backward();
    const double norm = tessera::clip_grad_norm(parameters, 1.0);
    // What a rank holds nothing of may have no gradient.
    const auto with_gradient = std::ranges::find_if(
        parameters, [](const auto& parameter) { return parameter.local.grad().defined(); });
    const std::string dtype = c10::toString(with_gradient->local.grad().scalar_type());
    optimizer.step();
    std::fprintf(out, "%.9g %.9g %s\n", loss.item<double>(), norm, dtype.c_str());
  }
  std::fclose(out);
  tessera::unshard(net);
  if (mesh.rank() != 0) return;
  std::ofstream final(directory + "/" + mode + ".final", std::ios::binary);
  for (const auto& parameter : net->parameters()) write_bytes(final, parameter);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    const auto mesh = tessera::Mesh::from_environment();
    for (int i = 2; i < argc; ++i) train(argv[1], argv[i], mesh);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
