// The models of PyTorch's tests of optimizer state (spec H-01 to H-12, T-17 to T-19), with its
// names, its shapes and its order of parameters. Two of a kind are equal: each draws from
// generators of its own, because ranks are threads.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/value.h"

namespace tessera::testing {

// As torch.manual_seed, of one's own.
[[nodiscard]] at::Generator generator_of(std::uint64_t seed);
// With PyTorch's initial values.
[[nodiscard]] torch::nn::Linear make_linear(std::int64_t in, std::int64_t out,
                                            at::Generator& generator);

template <typename Holder>
Holder fsdp(Holder module, const Mesh& mesh, const FullyShardedOptions& options = {}) {
  return FullyShardedDataParallel<Holder>(std::move(module), mesh, options).module();
}

struct BiasImpl : torch::nn::Module {
  torch::Tensor bias;
  explicit BiasImpl(std::int64_t dim);
  torch::Tensor forward(const torch::Tensor& x) { return x + bias; }
};
TESSERA_MODULE(Bias);

// BlockA draws its first bias before its weight, BlockB after it.
enum class BlockKind : std::uint8_t { a, b };
struct BiasedBlockImpl : torch::nn::Module {
  torch::Tensor weight;
  Bias bias_module0{nullptr}, bias_module1{nullptr};
  BiasedBlockImpl(BlockKind kind, std::int64_t in, std::int64_t out);
  torch::Tensor forward(const torch::Tensor& x) {
    return bias_module1(torch::relu(bias_module0(torch::matmul(x, weight))));
  }
};
TESSERA_MODULE(BiasedBlock);

// PyTorch has a Sequential here.
struct ThreeBlocksImpl : torch::nn::Module {
  BiasedBlock first{nullptr}, second{nullptr}, third{nullptr};
  ThreeBlocksImpl();
  torch::Tensor forward(const torch::Tensor& x) { return third(second(first(x))); }
};
TESSERA_MODULE(ThreeBlocks);

struct NestedModelImpl : torch::nn::Module {
  BiasedBlock block0{nullptr}, block1{nullptr};
  torch::Tensor bias;
  ThreeBlocks block2{nullptr};
  bool checkpoints_block2 = false;
  NestedModelImpl();
  torch::Tensor forward(const torch::Tensor& x);
};
TESSERA_MODULE(NestedModel);

struct NestedOptions {
  bool alternative = false;  // wrap_alt
  bool ignore_modules = false;
  bool use_orig_params = false;
};
// The model itself does not become a unit.
void wrap_nested(NestedModel& model, const Mesh& mesh, const NestedOptions& options = {});
// Before wrapping: one more parameter, of a module that becomes a unit or of the model itself.
torch::Tensor add_unmanaged_param(NestedModel& model, bool to_fsdp_module);
// What the two groups are made of; `bias` is in none.
[[nodiscard]] std::vector<torch::Tensor> param_group0(const NestedModel& model);
[[nodiscard]] std::vector<torch::Tensor> param_group1(const NestedModel& model);

// Also DenseModel of T-18, from another seed.
struct DummyModelImpl : torch::nn::Module {
  torch::nn::Sequential net1, net2, net4;
  torch::nn::Linear net3{nullptr};
  at::Generator inputs;
  explicit DummyModelImpl(bool no_grad = false);
  torch::Tensor forward(const torch::Tensor& x) {
    return net4->forward(net3(net2->forward(net1->forward(x))));
  }
  torch::Tensor get_input() { return torch::rand({8, 8}, inputs); }
};
TESSERA_MODULE(DummyModel);

struct SimpleModelImpl : torch::nn::Module {
  torch::nn::Sequential net1;
  SimpleModelImpl();
  torch::Tensor forward(const torch::Tensor& x) { return net1->forward(x); }
};
TESSERA_MODULE(SimpleModel);

struct TwoLinearsImpl : torch::nn::Module {
  torch::nn::Linear lin1{nullptr}, lin2{nullptr};
  TwoLinearsImpl();
  // lin1 is never used.
  torch::Tensor forward(const torch::Tensor& x) { return torch::relu(call_module(lin2, x)); }
};
TESSERA_MODULE(TwoLinears);

// A dense part that is a unit and a sparse one that is each rank's own: rank 0 has `sparse0`, the
// others `sparse1`.
struct FakeMpModelImpl : torch::nn::Module {
  DummyModel dense{nullptr};
  torch::nn::Sequential sparse;
  Mesh mesh;
  explicit FakeMpModelImpl(const Mesh& mesh);
  torch::Tensor forward(const torch::Tensor& x);
};
TESSERA_MODULE(FakeMpModel);

// TransformerWithSharedParams, in eval mode. torch::nn::Transformer calls its layers unseen.
struct EncoderLayerImpl : torch::nn::Module {
  torch::nn::MultiheadAttention self_attn{nullptr};
  torch::nn::Linear linear1{nullptr}, linear2{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  EncoderLayerImpl();
  torch::Tensor forward(const torch::Tensor& source);
};
TESSERA_MODULE(EncoderLayer);

struct DecoderLayerImpl : torch::nn::Module {
  torch::nn::MultiheadAttention self_attn{nullptr}, multihead_attn{nullptr};
  torch::nn::Linear linear1{nullptr}, linear2{nullptr};
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr}, norm3{nullptr};
  DecoderLayerImpl();
  torch::Tensor forward(const torch::Tensor& target, const torch::Tensor& memory);
};
TESSERA_MODULE(DecoderLayer);

struct TransformerModelImpl : torch::nn::Module {
  torch::nn::Embedding embed_tokens{nullptr};
  std::vector<EncoderLayer> encoder_layers;
  std::vector<DecoderLayer> decoder_layers;
  torch::nn::LayerNorm encoder_norm{nullptr}, decoder_norm{nullptr};
  torch::Tensor output_bias, vocab_bias, long_buffer;
  torch::nn::BatchNorm1d bn{nullptr};
  TransformerModelImpl();
  torch::Tensor forward(const torch::Tensor& source, const torch::Tensor& target);
};
TESSERA_MODULE(TransformerModel);

void wrap_transformer(TransformerModel& model, const Mesh& mesh, bool use_orig_params = false);
[[nodiscard]] torch::Tensor transformer_loss(TransformerModel& model);

// A model as tests/golden/make/optim_state.py has it, by its name there, with Adam at 0.01.
struct Peer {
  std::shared_ptr<torch::nn::Module> module;
  std::function<torch::Tensor(const torch::Tensor& batch)> loss;
  std::unique_ptr<torch::optim::Adam> optim;
};
// Sharded, from the file's weights. Throws `not_found` for weights that the model lacks.
[[nodiscard]] Peer make_peer(const std::string& name, const Value& weights, const Mesh& mesh,
                             bool original);
[[nodiscard]] std::unique_ptr<torch::optim::Adam> make_adam(ModuleRef module, double lr);

}  // namespace tessera::testing
