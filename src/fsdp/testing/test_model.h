// The model of the runtime's tests: odd sizes, so that shards are uneven and some are empty.
#pragma once

#include <torch/torch.h>

#include <string>
#include <vector>

#include "tessera/fsdp.h"
#include "tessera/value.h"
#include "torch/testing.h"

namespace tessera::testing {

constexpr std::int64_t kVocabulary = 11;
constexpr std::int64_t kWidth = 7;

struct BlockImpl : torch::nn::Module {
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear up{nullptr}, down{nullptr};
  BlockImpl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    up = register_module("up", torch::nn::Linear(kWidth, 13));
    down = register_module("down", torch::nn::Linear(13, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x + down(torch::gelu(up(norm(x)))); }
};
TESSERA_MODULE(Block);

// An output layer whose weight may be another module's.
struct HeadImpl : torch::nn::Module {
  torch::Tensor weight;
  explicit HeadImpl(const torch::Tensor& shared) { weight = register_parameter("weight", shared); }
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight); }
};
TESSERA_MODULE(Head);

// Two blocks, each of which may be a unit, and a layer behind them.
struct TanhBlockImpl : torch::nn::Module {
  torch::nn::Linear linear{nullptr};
  TanhBlockImpl() { linear = register_module("linear", torch::nn::Linear(4, 4)); }
  torch::Tensor forward(const torch::Tensor& x) { return linear(x).tanh(); }
};
TESSERA_MODULE(TanhBlock);

struct TanhStackImpl : torch::nn::Module {
  TanhBlock first, second;
  torch::nn::Linear out{nullptr};
  TanhStackImpl() {
    register_module("first", first.ptr());
    register_module("second", second.ptr());
    out = register_module("out", torch::nn::Linear(4, 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return out(second(first(x))); }
};
TESSERA_MODULE(TanhStack);

struct NetOptions {
  bool tied = false;
  int blocks = 3;
};

struct NetImpl : torch::nn::Module {
  torch::nn::Embedding embed{nullptr};
  std::vector<Block> blocks;
  Head head{nullptr};
  explicit NetImpl(const NetOptions& options) {
    embed = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
    for (int i = 0; i < options.blocks; ++i) {
      blocks.push_back(register_module("block" + std::to_string(i), Block()));
    }
    const auto fresh = torch::nn::Linear(torch::nn::LinearOptions(kWidth, kVocabulary).bias(false));
    head = register_module("head", Head(options.tied ? embed->weight : fresh->weight));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = embed(tokens);
    for (auto& block : blocks) x = block(x);
    return head(x);
  }
};
TESSERA_MODULE(Net);

inline Net make_net(const NetOptions& options) {
  return with_values(Net(options), 7);
}

inline void shard(Net& net, const Mesh& mesh) {
  for (auto& block : net->blocks) fully_shard(block, mesh);
  fully_shard(net, mesh);
}

// A net of one block whose block and root are units.
inline Net sharded_net(const Mesh& mesh, bool tied) {
  auto net = make_net({.tied = tied, .blocks = 1});
  shard(net, mesh);
  return net;
}

inline std::vector<std::string> keys(const Value& dict) {
  std::vector<std::string> names;
  for (const auto& pair : dict.pairs()) names.push_back(pair.first.as_string());
  return names;
}

}  // namespace tessera::testing
