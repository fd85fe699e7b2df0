#include "optim_state/test_models.h"

#include <cmath>
#include <string>

#include "tessera/activation_checkpoint.h"
#include "tessera/error.h"
#include "torch/tensor.h"

namespace tessera::testing {
namespace {

namespace nn = torch::nn;
using nn::Linear;

constexpr std::int64_t kVocabulary = 23, kWidth = 16, kHidden = 8, kHeads = 8, kBatch = 2;

nn::LayerNorm make_norm() {
  return nn::LayerNorm(nn::LayerNormOptions({kWidth}));
}

nn::MultiheadAttention make_attention() {
  return nn::MultiheadAttention(nn::MultiheadAttentionOptions(kWidth, kHeads));
}

torch::Tensor attend(nn::MultiheadAttention& attention, const torch::Tensor& query,
                     const torch::Tensor& key) {
  return std::get<0>(attention->forward(query, key, key, {}, /*need_weights=*/false));
}

std::vector<torch::Tensor> locals_of(ModuleRef module) {
  return local_tensors(sharded_parameters(module));
}

}  // namespace

at::Generator generator_of(std::uint64_t seed) {
  return at::make_generator<at::CPUGeneratorImpl>(seed);
}

Linear make_linear(std::int64_t in, std::int64_t out, at::Generator& generator) {
  const torch::NoGradGuard no_grad;
  Linear linear(in, out);
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  linear->weight.uniform_(-bound, bound, generator);
  linear->bias.uniform_(-bound, bound, generator);
  return linear;
}

BiasImpl::BiasImpl(std::int64_t dim) {
  auto generator = generator_of(0);
  bias = register_parameter("bias", torch::randn({dim}, generator));
}

BiasedBlockImpl::BiasedBlockImpl(BlockKind kind, std::int64_t in, std::int64_t out) {
  auto generator = generator_of(0);
  if (kind == BlockKind::a) static_cast<void>(torch::randn({out}, generator));
  weight = register_parameter("weight", torch::randn({in, out}, generator));
  bias_module0 = register_module("bias_module0", Bias(out));
  bias_module1 = register_module("bias_module1", Bias(out));
}

ThreeBlocksImpl::ThreeBlocksImpl() {
  first = register_module("0", BiasedBlock(BlockKind::a, 7, 9));
  second = register_module("1", BiasedBlock(BlockKind::a, 9, 9));
  third = register_module("2", BiasedBlock(BlockKind::b, 9, 5));
}

NestedModelImpl::NestedModelImpl() {
  block0 = register_module("block0", BiasedBlock(BlockKind::b, 5, 3));
  block1 = register_module("block1", BiasedBlock(BlockKind::b, 3, 7));
  // Drawn after block1 has drawn the bias of its last module.
  auto generator = generator_of(0);
  static_cast<void>(torch::randn({7}, generator));
  bias = register_parameter("bias", torch::randn({5}, generator));
  block2 = register_module("block2", ThreeBlocks());
}

torch::Tensor NestedModelImpl::forward(const torch::Tensor& x) {
  const auto y = torch::relu(block1(torch::relu(block0(x))));
  return torch::relu(checkpoints_block2 ? activation_checkpoint(block2, y) : block2(y)) + bias;
}

void wrap_nested(NestedModel& model, const Mesh& mesh, const NestedOptions& options) {
  const FullyShardedOptions plain{.use_orig_params = options.use_orig_params};
  if (options.alternative) {
    fsdp(model->block0->bias_module0, mesh, plain);
    fsdp(model->block0, mesh, plain);
    return;
  }
  fsdp(model->block1->bias_module0, mesh, plain);
  fsdp(model->block1, mesh, plain);
  auto& second = model->block2->second;
  fsdp(second->bias_module0, mesh, plain);
  fsdp(second->bias_module1, mesh, plain);
  fsdp(second, mesh, plain);
  auto last = plain;
  if (options.ignore_modules) last.ignored_modules = {model->block2->third->bias_module0.ptr()};
  fsdp(model->block2->third, mesh, last);
}

torch::Tensor add_unmanaged_param(NestedModel& model, bool to_fsdp_module) {
  auto generator = generator_of(1);
  const auto param = torch::randn({5, 5}, generator);
  torch::nn::Module& module =
      to_fsdp_module ? static_cast<torch::nn::Module&>(*model->block2->third) : *model;
  return module.register_parameter("unmanaged_param", param);
}

std::vector<torch::Tensor> param_group0(const NestedModel& model) {
  return locals_of(model->block1);
}

std::vector<torch::Tensor> param_group1(const NestedModel& model) {
  auto params = locals_of(model->block2);
  for (auto& param : locals_of(model->block0)) params.push_back(std::move(param));
  return params;
}

DummyModelImpl::DummyModelImpl(bool no_grad) : inputs(generator_of(1)) {
  auto generator = generator_of(0);
  net1 = register_module("net1", nn::Sequential(make_linear(8, 16, generator), nn::ReLU()));
  for (auto& parameter : net1->parameters()) parameter.set_requires_grad(!no_grad);
  net2 = register_module("net2", nn::Sequential(make_linear(16, 32, generator), nn::ReLU()));
  net3 = register_module("net3", make_linear(32, 64, generator));
  net4 = register_module("net4", nn::Sequential(nn::ReLU(), make_linear(64, 8, generator)));
}

SimpleModelImpl::SimpleModelImpl() {
  auto generator = generator_of(0);
  net1 = register_module("net1", nn::Sequential(make_linear(2, 4, generator), nn::ReLU()));
}

TwoLinearsImpl::TwoLinearsImpl() {
  auto generator = generator_of(0);
  lin1 = register_module("lin1", make_linear(5, 5, generator));
  lin2 = register_module("lin2", make_linear(5, 5, generator));
}

FakeMpModelImpl::FakeMpModelImpl(const Mesh& of) : mesh(of) {
  auto generator = generator_of(2);
  dense = register_module("dense", fsdp(DummyModel(), mesh, {.use_orig_params = true}));
  sparse = register_module(mesh.rank() == 0 ? "sparse0" : "sparse1",
                           nn::Sequential(make_linear(8, 8, generator), nn::ReLU()));
}

torch::Tensor FakeMpModelImpl::forward(const torch::Tensor& x) {
  const auto own = sparse->forward(x);
  auto sum = own.detach().clone();
  mesh.all_reduce_sum(sum);
  // The gradient passes the sum as if it was not there.
  return dense(own + (sum - own.detach()));
}

EncoderLayerImpl::EncoderLayerImpl() {
  self_attn = register_module("self_attn", make_attention());
  linear1 = register_module("linear1", Linear(kWidth, kHidden));
  linear2 = register_module("linear2", Linear(kHidden, kWidth));
  norm1 = register_module("norm1", make_norm());
  norm2 = register_module("norm2", make_norm());
}

torch::Tensor EncoderLayerImpl::forward(const torch::Tensor& source) {
  const auto x = norm1(source + attend(self_attn, source, source));
  return norm2(x + linear2(torch::relu(linear1(x))));
}

DecoderLayerImpl::DecoderLayerImpl() {
  self_attn = register_module("self_attn", make_attention());
  multihead_attn = register_module("multihead_attn", make_attention());
  linear1 = register_module("linear1", Linear(kWidth, kHidden));
  linear2 = register_module("linear2", Linear(kHidden, kWidth));
  norm1 = register_module("norm1", make_norm());
  norm2 = register_module("norm2", make_norm());
  norm3 = register_module("norm3", make_norm());
}

torch::Tensor DecoderLayerImpl::forward(const torch::Tensor& target, const torch::Tensor& memory) {
  auto x = norm1(target + attend(self_attn, target, target));
  x = norm2(x + attend(multihead_attn, x, memory));
  return norm3(x + linear2(torch::relu(linear1(x))));
}

namespace {

// A module that only holds others, as torch.nn.Transformer's encoder and decoder do.
struct HolderImpl : nn::Module {
  template <typename Layer>
  HolderImpl(const std::vector<Layer>& layers, const nn::LayerNorm& norm) {
    nn::ModuleList list;
    for (const auto& layer : layers) list->push_back(layer);
    register_module("layers", list);
    register_module("norm", norm);
  }
};

// The output layer: its weight is the embedding's.
struct OutputImpl : nn::Module {
  OutputImpl(const torch::Tensor& weight, torch::Tensor& bias) {
    register_parameter("weight", weight);
    bias = register_parameter("bias", torch::zeros({kVocabulary}));
  }
};

// Matrices and biases at random; norms stay as they are.
void draw_values(nn::Module& module) {
  const torch::NoGradGuard no_grad;
  auto generator = generator_of(0);
  for (auto& entry : module.named_parameters()) {
    auto& value = entry.value();
    const auto& name = entry.key();
    if (!value.defined() || name.find("norm") != std::string::npos || name.starts_with("bn.")) {
      continue;
    }
    const double fan = value.dim() > 1 ? static_cast<double>(value.size(0) + value.size(1)) : 600;
    const double bound = std::sqrt(6 / fan);
    value.uniform_(-bound, bound, generator);
  }
}

}  // namespace

TransformerModelImpl::TransformerModelImpl() {
  embed_tokens = register_module("embed_tokens", nn::Embedding(kVocabulary, kWidth));
  encoder_layers = {EncoderLayer(), EncoderLayer()};
  decoder_layers = {DecoderLayer(), DecoderLayer()};
  encoder_norm = make_norm();
  decoder_norm = make_norm();
  const auto transformer = register_module("transformer", std::make_shared<nn::Module>());
  transformer->register_module("encoder",
                               std::make_shared<HolderImpl>(encoder_layers, encoder_norm));
  transformer->register_module("decoder",
                               std::make_shared<HolderImpl>(decoder_layers, decoder_norm));
  register_module("output_proj", std::make_shared<OutputImpl>(embed_tokens->weight, output_bias));
  vocab_bias = register_buffer("vocab_bias", torch::ones({kWidth}));
  long_buffer = register_buffer("long_buffer", torch::zeros({kWidth}, torch::kLong));
  bn = register_module("bn", nn::BatchNorm1d(kBatch));
  draw_values(*this);
  eval();
}

torch::Tensor TransformerModelImpl::forward(const torch::Tensor& source,
                                            const torch::Tensor& target) {
  auto memory = embed_tokens(source);
  memory = memory + vocab_bias + long_buffer.to(memory.scalar_type());
  for (auto& layer : encoder_layers) memory = layer(memory);
  memory = encoder_norm(memory);
  auto x = bn(embed_tokens(target));
  for (auto& layer : decoder_layers) x = layer(x, memory);
  return torch::linear(decoder_norm(x), embed_tokens->weight, output_bias);
}

void wrap_transformer(TransformerModel& model, const Mesh& mesh, bool use_orig_params) {
  fsdp(model, mesh,
       {.auto_wrap_policy = module_wrap_policy<EncoderLayerImpl, DecoderLayerImpl>(),
        .use_orig_params = use_orig_params});
}

torch::Tensor transformer_loss(TransformerModel& model) {
  const auto source = torch::arange(12).view({6, kBatch}),
             target = torch::arange(8).view({4, kBatch});
  const auto output = model(source, target);
  return torch::cross_entropy_loss(output.view({-1, kVocabulary}), target.view({-1}), {},
                                   at::Reduction::Sum);
}

// Beside PyTorch ------------------------------------------------------------------------------

std::unique_ptr<torch::optim::Adam> make_adam(ModuleRef module, double lr) {
  return std::make_unique<torch::optim::Adam>(locals_of(module), torch::optim::AdamOptions(lr));
}

namespace {

void take_weights(nn::Module& module, const Value& weights) {
  const torch::NoGradGuard no_grad;
  std::size_t taken = 0;
  for (auto& entry : module.named_parameters()) {
    const auto* weight = weights.find(entry.key());
    if (weight == nullptr) continue;  // of a shared parameter: its other name
    entry.value().copy_(tensor_of(weight->as_tensor()));
    ++taken;
  }
  if (taken != weights.size())
    throw Error(ErrorCode::not_found, "the file has weights that the model lacks");
}

}  // namespace

Peer make_peer(const std::string& name, const Value& weights, const Mesh& mesh, bool original) {
  if (name == "nested") {
    NestedModel model;
    take_weights(*model, weights);
    wrap_nested(model, mesh, {.use_orig_params = original});
    return {model.ptr(), [model](const auto& batch) mutable { return model(batch).sum(); },
            make_adam(model, 0.01)};
  }
  if (name == "dummy") {
    DummyModel model;
    take_weights(*model, weights);
    fsdp(model, mesh, {.use_orig_params = original});
    return {model.ptr(), [model](const auto& batch) mutable { return model(batch).sum(); },
            make_adam(model, 0.01)};
  }
  TransformerModel model;
  take_weights(*model, weights);
  wrap_transformer(model, mesh, original);
  return {model.ptr(), [model](const auto&) mutable { return transformer_loss(model); },
          make_adam(model, 0.01)};
}

}  // namespace tessera::testing
