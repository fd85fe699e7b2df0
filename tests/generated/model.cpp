#include "generated/model.h"

#include <ATen/CPUGeneratorImpl.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>

#include "tessera/activation_checkpoint.h"

namespace tessera::generated {
namespace {

namespace nn = torch::nn;
using torch::Tensor;

struct LinearBlock : BlockImpl {
  nn::Linear layer{nullptr};
  explicit LinearBlock(int width) { layer = register_module("layer", nn::Linear(width, width)); }
  Tensor forward(const Tensor& x, const Route&) override {
    return torch::tanh(call_module(layer, x));
  }
};

struct MlpBlock : BlockImpl {
  nn::LayerNorm norm{nullptr};
  nn::Linear up{nullptr}, down{nullptr};
  explicit MlpBlock(int width) {
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
    up = register_module("up", nn::Linear(width, 2 * width + 1));
    down = register_module("down", nn::Linear(2 * width + 1, width));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + call_module(down, torch::gelu(call_module(up, call_module(norm, x))));
  }
};

struct SequentialBlock : BlockImpl {
  nn::Sequential layers{nullptr};
  explicit SequentialBlock(int width) {
    layers = register_module(
        "layers", nn::Sequential(nn::Linear(width, 5), nn::Tanh(), nn::Linear(5, width)));
  }
  Tensor forward(const Tensor& x, const Route&) override { return x + layers->forward(x); }
};

struct ConvBlock : BlockImpl {
  nn::Conv1d conv{nullptr};
  explicit ConvBlock(int width) {
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(width, width, 3).padding(1)));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + call_module(conv, x.transpose(1, 2)).transpose(1, 2);
  }
};

struct NormBlock : BlockImpl {
  nn::GroupNorm groups{nullptr};
  nn::LayerNorm norm{nullptr};
  explicit NormBlock(int width) {
    groups = register_module("groups", nn::GroupNorm(nn::GroupNormOptions(2, width)));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({width})));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + call_module(norm, call_module(groups, x.transpose(1, 2)).transpose(1, 2));
  }
};

struct AttentionBlock : BlockImpl {
  nn::Linear qkv{nullptr}, out{nullptr};
  explicit AttentionBlock(int width) {
    qkv = register_module("qkv", nn::Linear(width, 3 * width));
    out = register_module("out", nn::Linear(nn::LinearOptions(width, width).bias(false)));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto parts = call_module(qkv, x).chunk(3, -1);
    return x + call_module(out, at::scaled_dot_product_attention(parts[0], parts[1], parts[2]));
  }
};

struct MultiheadBlock : BlockImpl {
  nn::MultiheadAttention attention{nullptr};
  explicit MultiheadBlock(int width) {
    attention = register_module("attention", nn::MultiheadAttention(width, 2));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    const auto turned = x.transpose(0, 1);
    return x + std::get<0>(call_module(attention, turned, turned, turned)).transpose(0, 1);
  }
};

struct EncoderBlock : BlockImpl {
  nn::TransformerEncoderLayer layer{nullptr};
  explicit EncoderBlock(int width) {
    layer = register_module(
        "layer", nn::TransformerEncoderLayer(
                     nn::TransformerEncoderLayerOptions(width, 2).dim_feedforward(7).dropout(0)));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return call_module(layer, x.transpose(0, 1)).transpose(0, 1);
  }
};

struct GruBlock : BlockImpl {
  nn::GRU gru{nullptr};
  explicit GruBlock(int width) {
    gru = register_module("gru", nn::GRU(nn::GRUOptions(width, width).batch_first(true)));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + std::get<0>(call_module(gru, x));
  }
};

struct CellBlock : BlockImpl {
  nn::GRUCell cell{nullptr};
  explicit CellBlock(int width) { cell = register_module("cell", nn::GRUCell(width, width)); }
  Tensor forward(const Tensor& x, const Route&) override {
    auto state = torch::zeros_like(x.select(1, 0));
    std::vector<Tensor> states;
    for (std::int64_t at = 0; at < x.size(1); ++at) {
      state = call_module(cell, x.select(1, at), state);
      states.push_back(state);
    }
    return x + torch::stack(states, 1);
  }
};

struct ExpertsBlock : BlockImpl {
  std::vector<nn::Linear> experts;
  bool differ;  // among ranks
  ExpertsBlock(int width, bool by_rank) : differ(by_rank) {
    for (int i = 0; i < kExperts; ++i)
      experts.push_back(register_module("expert" + std::to_string(i), nn::Linear(width, width)));
  }
  Tensor forward(const Tensor& x, const Route& route) override {
    const auto chosen = (route.step + (differ ? route.rank : 0)) % kExperts;
    return x + torch::tanh(call_module(experts[chosen], x));
  }
};

struct TableBlock : BlockImpl {
  nn::Embedding table{nullptr};
  explicit TableBlock(int width) {
    table = register_module("table", nn::Embedding(kPositions + 2, width));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + call_module(table, torch::arange(x.size(1)));
  }
};

struct OwnBlock : BlockImpl {
  Tensor gain, shift, cube, offset;
  explicit OwnBlock(int width) {
    gain = register_parameter("gain", torch::ones({1, 1, width}));
    shift = register_parameter("shift", torch::ones({1}));
    cube = register_parameter("cube", torch::ones({2, 3, width}));
    offset = register_buffer("offset", torch::full({width}, 0.25));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x * gain + shift + cube.sum(at::IntArrayRef({0, 1})) + offset.to(x.scalar_type());
  }
};

struct TiedBlock : BlockImpl {
  Tensor weight, bias;
  TiedBlock(int width, const Tensor& shared) {
    weight = register_parameter("weight", shared);
    bias = register_parameter("bias", torch::ones({width}));
  }
  Tensor forward(const Tensor& x, const Route&) override {
    return x + torch::linear(x, weight, bias);
  }
};

struct NestedBlock : BlockImpl {
  BlockPointer first, second;
  explicit NestedBlock(int width) {
    first = register_module("first", std::make_shared<LinearBlock>(width));
    second = register_module("second", std::make_shared<MlpBlock>(width));
  }
  Tensor forward(const Tensor& x, const Route& route) override {
    return call_module(second, call_module(first, x, route), route);
  }
};

struct EmptyBlock : BlockImpl {
  Tensor forward(const Tensor& x, const Route&) override { return torch::tanh(x); }
};

BlockPointer make_block(const Block& drawn, int width, const std::vector<BlockPointer>& before) {
  switch (drawn.kind) {
    case BlockKind::linear:
      return std::make_shared<LinearBlock>(width);
    case BlockKind::mlp:
      return std::make_shared<MlpBlock>(width);
    case BlockKind::sequential:
      return std::make_shared<SequentialBlock>(width);
    case BlockKind::conv:
      return std::make_shared<ConvBlock>(width);
    case BlockKind::norm:
      return std::make_shared<NormBlock>(width);
    case BlockKind::attention:
      return std::make_shared<AttentionBlock>(width);
    case BlockKind::multihead:
      return std::make_shared<MultiheadBlock>(width);
    case BlockKind::encoder:
      return std::make_shared<EncoderBlock>(width);
    case BlockKind::gru:
      return std::make_shared<GruBlock>(width);
    case BlockKind::cell:
      return std::make_shared<CellBlock>(width);
    case BlockKind::experts_by_step:
    case BlockKind::experts_by_rank:
      return std::make_shared<ExpertsBlock>(width, drawn.kind == BlockKind::experts_by_rank);
    case BlockKind::table:
      return std::make_shared<TableBlock>(width);
    case BlockKind::own:
      return std::make_shared<OwnBlock>(width);
    case BlockKind::tied:
      return std::make_shared<TiedBlock>(
          width, std::dynamic_pointer_cast<LinearBlock>(before[drawn.source])->layer->weight);
    case BlockKind::nested:
      return std::make_shared<NestedBlock>(width);
    case BlockKind::empty:
      return std::make_shared<EmptyBlock>();
    default:
      return make_feature_block(drawn.kind, width);
  }
}

void fill(const Named& named, std::uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const bool is_gain = named.tensor.dim() == 1 && named.name.ends_with("weight");
  const auto rows = static_cast<double>(named.tensor.dim() > 1 ? named.tensor.size(-1) : 4);
  const double bound = 1 / std::sqrt(rows);
  auto values = torch::rand(named.tensor.sizes(), generator, torch::kDouble);
  if (named.tensor.is_complex())
    values = torch::complex(values, torch::rand(named.tensor.sizes(), generator, torch::kDouble));
  named.tensor.copy_((values * 2 - 1) * bound + (is_gain ? 1 : 0));
}

void freeze(const RootImpl& root, const Case& drawn) {
  for (int i = 0; i < static_cast<int>(drawn.blocks.size()); ++i) {
    if (drawn.blocks[i].frozen == Frozen::no) continue;
    for (auto& [name, tensor] : block_parameters(root, i)) {
      tensor.requires_grad_(false);
      if (drawn.blocks[i].frozen == Frozen::first) break;
    }
  }
}

}  // namespace

RootImpl::RootImpl(const Case& drawn, int width)
    : drawn_(drawn.blocks), checkpoint_all_(drawn.checkpoint_all) {
  in_ = register_module("in", torch::nn::Linear(width, width));
  for (const auto& block : drawn_) {
    blocks_.push_back(make_block(block, width, blocks_));
    register_module("block" + std::to_string(blocks_.size() - 1), blocks_.back());
  }
  out_ = register_module("out", torch::nn::Linear(width, kOutputs));
}

Tensor RootImpl::once(int block, const Tensor& x, const Route& route) {
  if (route.changes == block) {
    const auto first = std::make_shared<bool>(true);
    const auto call = [this, block, first](const Tensor& input, const Route& way) {
      const auto y = call_module(blocks_[block], input, way);
      return std::exchange(*first, false) ? y : torch::cat({y, y});
    };
    return activation_checkpoint(call, x, route);
  }
  const bool checkpoint = drawn_[block].checkpoint && !route.plain;
  return checkpoint ? activation_checkpoint(blocks_[block], x, route)
                    : call_module(blocks_[block], x, route);
}

Tensor RootImpl::run(int block, const Tensor& x, const Route& route) {
  if (route.throw_forward == block) throw std::runtime_error("bad batch");
  auto y = once(block, x, route);
  if (drawn_[block].twice) y = once(block, y, route);
  if (route.again == block) y = once(block, y, route);
  if (route.throw_backward == block && y.requires_grad()) {
    y.register_hook([once = route.throw_once](const Tensor&) {
      if (!once || std::exchange(*once, false)) throw std::runtime_error("bad batch");
    });
  }
  if (drawn_[block].hook && y.requires_grad())
    y.register_hook([](const Tensor& gradient) { return gradient / 2; });
  return y;
}

Tensor RootImpl::all(Tensor x, const Route& route) {
  const auto count = static_cast<int>(blocks_.size());
  std::vector<int> order;
  for (int i = 0; i < count; ++i) {
    if (route.skip != i) order.push_back(i);
  }
  if (route.swap >= 0 && count > 1) {
    const auto first = std::min(route.swap, count - 2);
    std::swap(order[first], order[first + 1]);
  }
  for (const int i : order) {
    try {
      x = run(i, x, route);
    } catch (const std::runtime_error& error) {
      if (!route.catches || std::string(error.what()) != "bad batch") throw;
    }
  }
  return x;
}

Tensor RootImpl::forward(Tensor x, const Route& route) {
  x = call_module(in_, x);
  const auto blocks = [this](const Tensor& input, const Route& way) { return all(input, way); };
  x = checkpoint_all_ && !route.plain ? activation_checkpoint(blocks, x, route) : all(x, route);
  return call_module(out_, x);
}

Root make_root(const Case& drawn, int width) {
  Root root(drawn, width);
  const torch::NoGradGuard no_grad;
  if (drawn.precision == Precision::fp64) root->to(torch::kDouble);
  // A bit of a rounding of bfloat16: enough to turn a few of them.
  const double nudge = is_low(drawn.precision) || drawn.autocast ? 1e-5 : 1e-6;
  std::uint64_t number = drawn.seed * 1000;
  for (const auto& named : own_parameters(*root)) {
    fill(named, ++number);
    if (drawn.nudged) named.tensor.mul_(1 + nudge);
  }
  freeze(*root, drawn);
  return root;
}

std::vector<Named> own_parameters(const torch::nn::Module& module) {
  std::unordered_set<const c10::TensorImpl*> seen;
  std::vector<Named> found;
  for (const auto& entry : module.named_parameters()) {
    if (seen.insert(entry.value().unsafeGetTensorImpl()).second)
      found.push_back({entry.key(), entry.value()});
  }
  return found;
}

std::vector<Named> block_parameters(const RootImpl& root, int block) {
  return own_parameters(*root.blocks()[block]);
}

Batch batch_of(const Case& drawn, int step, int micro, int rank, int rows) {
  const auto seed = drawn.seed * 1'000'000 + step * 1000 + micro * 10 + rank;
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto type = drawn.precision == Precision::fp64 ? torch::kDouble : torch::kFloat;
  return {torch::randn({rows, kPositions, drawn.width}, generator, torch::kDouble).to(type),
          torch::randn({rows, kPositions, kOutputs}, generator, torch::kDouble).to(type)};
}

Tensor loss_of(const std::function<Tensor(const Tensor&)>& call, const Batch& batch, Extra extra) {
  const auto loss = [&](const Tensor& input) {
    return (call(input).to(batch.target.scalar_type()) - batch.target).square().mean();
  };
  if (extra == Extra::nothing) return loss(batch.input);
  const auto input = batch.input.detach().clone().requires_grad_(true);
  const auto first = loss(input);
  const bool keeps = extra == Extra::penalty;
  const auto gradient = torch::autograd::grad({first}, {input}, {}, keeps, keeps).at(0);
  if (keeps) return first + gradient.square().sum();
  return loss((input + 5 * gradient).detach());
}

}  // namespace tessera::generated
