// One rank of a training beside PyTorch's fully_shard: prints the loss and the gradient norm of
// each step.
//   torchrun --no-python fsdp_losses DIR
// DIR/weights holds the initial parameters in the order of named_parameters() as float32,
// DIR/tokens int64 [steps, world, 2, 7]; the rank writes DIR/ours.RANK.
#include <torch/torch.h>

#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>

#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"

namespace {

namespace nn = torch::nn;

constexpr std::int64_t kVocabulary = 17, kWidth = 10, kHidden = 13, kRows = 2, kLength = 7,
                       kSteps = 5;

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

void train(const std::string& directory) {
  const auto mesh = tessera::Mesh::from_environment();
  Net net;
  std::ifstream weights(directory + "/weights", std::ios::binary);
  for (const auto& parameter : net->parameters()) read_into(weights, parameter.detach());
  auto tokens = torch::empty({kSteps, mesh.size(), kRows, kLength}, torch::kInt64);
  std::ifstream token_file(directory + "/tokens", std::ios::binary);
  read_into(token_file, tokens);

  for (std::size_t i = 0; i < net->h->size(); ++i)
    tessera::fully_shard(net->h->ptr<BlockImpl>(i), mesh);
  tessera::fully_shard(net, mesh);
  const auto parameters = tessera::sharded_parameters(net);
  tessera::AdamW optimizer(parameters, {.lr = 1e-2, .weight_decay = 0.1});
  std::FILE* out = std::fopen((directory + "/ours." + std::to_string(mesh.rank())).c_str(), "w");
  for (std::int64_t step = 0; step < kSteps; ++step) {
    const auto batch = tokens[step][mesh.rank()];
    const auto logits = net(batch.narrow(1, 0, kLength - 1));
    auto loss = torch::cross_entropy_loss(logits.reshape({-1, kVocabulary}),
                                          batch.narrow(1, 1, kLength - 1).reshape({-1}));
    loss.backward();
    const double norm = tessera::clip_grad_norm(parameters, 1.0);
    optimizer.step();
    optimizer.zero_grad();
    std::fprintf(out, "%.9g %.9g\n", loss.item<double>(), norm);
  }
  std::fclose(out);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    torch::set_num_threads(1);
    train(argc > 1 ? argv[1] : ".");
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 3;
  }
}
