// The model: a byte-level GPT. Pre-norm blocks, causal attention, learned positions.
//
// Nothing in it knows of sharding; TESSERA_MODULE is all that `fully_shard` needs. Its parameters
// have the names of the same model in Python, so each side loads what the other saves: wte wpe
// h.N.{ln1 qkv out ln2 up down} ln head.
#pragma once

#include <torch/torch.h>

#include <cmath>
#include <string>
#include <vector>

#include "tessera/fsdp.h"

inline constexpr std::int64_t kVocabulary = 256;  // bytes

struct GptConfig {
  std::int64_t dim = 256;
  std::int64_t layers = 8;
  std::int64_t heads = 8;
  std::int64_t seq = 128;
  bool tied = false;
};

struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t dim, std::int64_t head_count)
      : heads(head_count),
        ln1(register_module("ln1", torch::nn::LayerNorm(std::vector<std::int64_t>{dim}))),
        qkv(register_module("qkv", torch::nn::Linear(dim, 3 * dim))),
        out(register_module("out", torch::nn::Linear(dim, dim))),
        ln2(register_module("ln2", torch::nn::LayerNorm(std::vector<std::int64_t>{dim}))),
        up(register_module("up", torch::nn::Linear(dim, 4 * dim))),
        down(register_module("down", torch::nn::Linear(4 * dim, dim))) {}

  torch::Tensor forward(torch::Tensor x) {
    x = x + out(attention(qkv(ln1(x))));
    return x + down(torch::gelu(up(ln2(x))));
  }

  // [batch, time, 3 * dim] -> [batch, time, dim]
  torch::Tensor attention(const torch::Tensor& qkv_of_x) const {
    const auto batch = qkv_of_x.size(0);
    const auto time = qkv_of_x.size(1);
    const auto dim = qkv_of_x.size(2) / 3;
    // Not three times [i]: backward would fill and add up three arrays of zeros.
    const auto parts =
        qkv_of_x.view({batch, time, 3, heads, dim / heads}).permute({2, 0, 3, 1, 4}).unbind(0);
    const auto mixed = torch::scaled_dot_product_attention(
        parts[0], parts[1], parts[2], /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return mixed.transpose(1, 2).reshape({batch, time, dim});
  }

  std::int64_t heads;
  torch::nn::LayerNorm ln1;
  torch::nn::Linear qkv, out;
  torch::nn::LayerNorm ln2;
  torch::nn::Linear up, down;
};
TESSERA_MODULE(Block);

// From width to bytes. Its weight may be one with the embedding's: one parameter with two names.
struct HeadImpl : torch::nn::Module {
  HeadImpl(std::int64_t dim, const torch::Tensor& tied_to) {
    const torch::nn::Linear own(dim, kVocabulary);
    weight = register_parameter("weight", tied_to.defined() ? tied_to : own->weight);
    bias = register_parameter("bias", own->bias);
  }
  torch::Tensor forward(const torch::Tensor& x) { return torch::linear(x, weight, bias); }

  torch::Tensor weight, bias;
};
TORCH_MODULE(Head);

struct GptImpl : torch::nn::Module {
  explicit GptImpl(const GptConfig& config)
      : wte(register_module("wte", torch::nn::Embedding(kVocabulary, config.dim))),
        wpe(register_module("wpe", torch::nn::Embedding(config.seq, config.dim))) {
    const auto list = register_module("h", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < config.layers; ++i) {
      blocks.emplace_back(config.dim, config.heads);
      list->push_back(blocks.back().ptr());
    }
    ln = register_module("ln", torch::nn::LayerNorm(std::vector<std::int64_t>{config.dim}));
    head = register_module("head", Head(config.dim, config.tied ? wte->weight : torch::Tensor()));
  }

  // Bytes [batch, time] -> logits of the next byte [batch, time, 256].
  torch::Tensor forward(const torch::Tensor& bytes) {
    torch::Tensor x = wte(bytes) + wpe(torch::arange(bytes.size(1), bytes.options()));
    for (Block& block : blocks) x = block(x);
    return head(ln(x));
  }

  torch::nn::Embedding wte, wpe;
  std::vector<Block> blocks;
  torch::nn::LayerNorm ln{nullptr};
  Head head{nullptr};
};
TESSERA_MODULE(Gpt);

// The same weights on every rank and for every number of ranks: they depend on the seed alone.
inline Gpt make_gpt(const GptConfig& config, std::uint64_t seed) {
  torch::manual_seed(seed);
  Gpt gpt(config);
  const torch::NoGradGuard no_grad;
  // What each block adds to the stream starts smaller the more blocks there are.
  const double added = 0.02 / std::sqrt(2.0 * static_cast<double>(config.layers));
  for (auto& entry : gpt->named_parameters()) {
    const std::string& name = entry.key();
    if (name.ends_with("bias")) {
      entry.value().zero_();
    } else if (name.ends_with("out.weight") || name.ends_with("down.weight")) {
      entry.value().normal_(0, added);
    } else if (entry.value().dim() == 2) {
      entry.value().normal_(0, 0.02);
    }
  }
  return gpt;
}
