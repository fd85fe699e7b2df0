// OLMo's transformer as ai2-olmo 0.6.0 builds it from a configuration without rotary embeddings and
// biases: the same names, shapes, order of parameters and arithmetic.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/fsdp.h"
#include "tessera/value.h"

namespace tessera::testing {

struct OlmoConfig {
  std::int64_t width = 0, heads = 0, layers = 0, hidden = 0, vocabulary = 0, length = 0;
  double attention_dropout = 0, residual_dropout = 0, embedding_dropout = 0;

  // The `model` of a TrainConfig.
  static OlmoConfig of(const Value& model) {
    OlmoConfig config;
    config.width = model.at("d_model").as_int();
    config.heads = model.at("n_heads").as_int();
    config.layers = model.at("n_layers").as_int();
    config.hidden = config.width * model.at("mlp_ratio").as_int();
    config.vocabulary = model.at("embedding_size").as_int();
    config.length = model.at("max_sequence_length").as_int();
    config.attention_dropout = model.at("attention_dropout").as_real();
    config.residual_dropout = model.at("residual_dropout").as_real();
    config.embedding_dropout = model.at("embedding_dropout").as_real();
    return config;
  }
};

// OLMo draws no random numbers for a rate of zero.
inline torch::Tensor dropped(const torch::Tensor& x, double rate, bool is_training) {
  return rate == 0 ? x : torch::dropout(x, rate, is_training);
}

struct OlmoNormImpl : torch::nn::Module {
  explicit OlmoNormImpl(std::int64_t width)
      : weight(register_parameter("weight", torch::ones({width}))) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::layer_norm(x, weight.sizes(), weight, {}, 1e-5);
  }
  torch::Tensor weight;
};
TORCH_MODULE(OlmoNorm);

inline torch::nn::Linear olmo_linear(std::int64_t in, std::int64_t out) {
  return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
}

struct OlmoBlockImpl : torch::nn::Module {
  explicit OlmoBlockImpl(const OlmoConfig& of)
      : config(of),
        attn_out(register_module("attn_out", olmo_linear(of.width, of.width))),
        ff_out(register_module("ff_out", olmo_linear(of.hidden / 2, of.width))),
        att_proj(register_module("att_proj", olmo_linear(of.width, 3 * of.width))),
        ff_proj(register_module("ff_proj", olmo_linear(of.width, of.hidden))),
        attn_norm(register_module("attn_norm", OlmoNorm(of.width))),
        ff_norm(register_module("ff_norm", OlmoNorm(of.width))) {}

  torch::Tensor forward(const torch::Tensor& input) {
    const auto parts = att_proj(attn_norm(input)).split(config.width, -1);
    const auto heads = [&](const torch::Tensor& x) {
      return x.view({x.size(0), x.size(1), config.heads, config.width / config.heads})
          .transpose(1, 2);
    };
    const auto mixed = torch::scaled_dot_product_attention(
        heads(parts[0]), heads(parts[1]), heads(parts[2]), /*attn_mask=*/{},
        is_training() ? config.attention_dropout : 0.0, /*is_causal=*/true);
    const auto attended = attn_out(mixed.transpose(1, 2).contiguous().view(input.sizes()));
    const auto x = input + dropped(attended, config.residual_dropout, is_training());
    const auto halves = ff_proj(ff_norm(x)).chunk(2, -1);
    const auto made = ff_out(torch::silu(halves[1]) * halves[0]);
    return x + dropped(made, config.residual_dropout, is_training());
  }

  OlmoConfig config;
  torch::nn::Linear attn_out, ff_out, att_proj, ff_proj;
  OlmoNorm attn_norm, ff_norm;
};
TESSERA_MODULE(OlmoBlock);

// Python's ModuleDict "transformer": it holds what Olmo calls.
struct OlmoTransformerImpl : torch::nn::Module {
  explicit OlmoTransformerImpl(const OlmoConfig& of)
      : wte(register_module("wte", torch::nn::Embedding(of.vocabulary, of.width))),
        ln_f(register_module("ln_f", OlmoNorm(of.width))),
        list(register_module("blocks", torch::nn::ModuleList())) {
    for (std::int64_t i = 0; i < of.layers; ++i) {
      blocks.emplace_back(of);
      list->push_back(blocks.back().ptr());
    }
    wpe = register_module("wpe", torch::nn::Embedding(of.length, of.width));
    ff_out = register_module("ff_out", olmo_linear(of.width, of.vocabulary));
  }
  torch::nn::Embedding wte;
  OlmoNorm ln_f;
  torch::nn::ModuleList list;
  std::vector<OlmoBlock> blocks;
  torch::nn::Embedding wpe{nullptr};
  torch::nn::Linear ff_out{nullptr};
};
TORCH_MODULE(OlmoTransformer);

struct OlmoImpl : torch::nn::Module {
  explicit OlmoImpl(const OlmoConfig& of)
      : config(of), transformer(register_module("transformer", OlmoTransformer(of))) {}

  // [batch, time] of tokens -> [batch, time, vocabulary]
  torch::Tensor forward(const torch::Tensor& tokens) {
    const auto places = torch::arange(tokens.size(1)).unsqueeze(0);
    auto x = transformer->wpe(places) + transformer->wte(tokens);
    x = dropped(x, config.embedding_dropout, is_training());
    for (auto& block : transformer->blocks) x = block(x);
    return transformer->ff_out(transformer->ln_f(x));
  }

  OlmoConfig config;
  OlmoTransformer transformer;
};
TESSERA_MODULE(Olmo);

}  // namespace tessera::testing
