// Units that only some micro-batches use (stochastic depth, experts, heads): what a backward
// without synchronisation left is in the step that it belongs to, however the model is wrapped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>
#include <string>
#include <vector>

#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

constexpr int kLayers = 4, kDeepSteps = 3, kDeepMicros = 3;

struct LayerImpl : nn::Module {
  nn::Linear linear{nullptr};
  LayerImpl() { linear = register_module("linear", nn::Linear(5, 5)); }
  torch::Tensor forward(const torch::Tensor& x) { return x + torch::tanh(linear(x)); }
};
TESSERA_MODULE(Layer);

struct DeepImpl : nn::Module {
  std::vector<Layer> layers;
  torch::Tensor head;
  std::vector<bool> uses = std::vector<bool>(kLayers, true);
  DeepImpl() {
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(register_module("layer" + std::to_string(i), Layer()));
    head = register_parameter("head", torch::ones({5, 2}));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < kLayers; ++i) {
      if (uses[i]) x = layers[i](x);
    }
    return torch::matmul(x, head);
  }
};
TESSERA_MODULE(Deep);

Deep make_deep() {
  auto deep = with_values(Deep(), 8);
  deep->to(torch::kDouble);
  return deep;
}

// Layer 0: always. 1: in the first micro-batch alone. 2: in the last alone. 3: in the middle one of
// even steps, and where ranks may differ only on the first rank.
void choose_layers(Deep& deep, int step, int micro, int rank, bool differ) {
  deep->uses = {true, micro == 0, micro == kDeepMicros - 1,
                micro == 1 && step % 2 == 0 && (!differ || rank == 0)};
}

torch::Tensor deep_input(int step, int micro, int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(1000 + 100 * step + 10 * micro + rank);
  return torch::randn({3, 5}, generator, torch::kDouble);
}

enum class DeepKind { fully_shard, kept, narrower, hybrid, copies, replicate, original, flat };

void wrap_deep(Deep& deep, const Mesh& mesh, DeepKind kind) {
  const auto each = [&](const auto& apply) {
    for (auto& layer : deep->layers) apply(layer);
    apply(deep);
  };
  const auto shard = [&](const auto& on, const ShardOptions& options) {
    each([&](auto& module) { fully_shard(module, on, options); });
  };
  switch (kind) {
    case DeepKind::fully_shard:
      return shard(mesh, {});
    case DeepKind::kept:
      return shard(mesh, {.reshard_after_forward = false, .reshard_after_backward = false});
    case DeepKind::narrower:
      return shard(mesh, {.mixed_precision = {.reduce_dtype = torch::kFloat}});
    case DeepKind::hybrid:
      return shard(mesh.split(2), {});
    case DeepKind::copies:
      return shard(mesh.split(1), {});
    case DeepKind::replicate:
      return each([&](auto& module) { replicate(module, mesh); });
    case DeepKind::original:
    case DeepKind::flat:
      FullyShardedDataParallel<Deep>(deep, mesh,
                                     {.auto_wrap_policy = module_wrap_policy<LayerImpl>(),
                                      .use_orig_params = kind == DeepKind::original});
  }
}

Deep deep_reference(int ranks, bool differ) {
  auto deep = make_deep();
  torch::optim::SGD optimizer(deep->parameters(), 0.01);
  for (int step = 0; step < kDeepSteps; ++step) {
    for (int micro = 0; micro < kDeepMicros; ++micro) {
      for (int rank = 0; rank < ranks; ++rank) {
        choose_layers(deep, step, micro, rank, differ);
        (deep(deep_input(step, micro, rank)).square().sum() / ranks).backward();
      }
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return deep;
}

// `wait(on)` begins and ends what leaves gradients where they are.
template <typename Wait>
void expect_deep_reference(DeepKind kind, int ranks, bool differ, const Wait& wait) {
  const auto expected = deep_reference(ranks, differ);
  const double tolerance = kind == DeepKind::narrower ? 1e-3 : 1e-9;
  run_mesh(ranks, [&](Mesh& mesh) {
    auto deep = make_deep();
    wrap_deep(deep, mesh, kind);
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(deep)), 0.01);
    for (int step = 0; step < kDeepSteps; ++step) {
      for (int micro = 0; micro < kDeepMicros; ++micro) {
        choose_layers(deep, step, micro, mesh.rank(), differ);
        [[maybe_unused]] const auto waiting = wait(deep, micro + 1 < kDeepMicros);
        deep(deep_input(step, micro, mesh.rank())).square().sum().backward();
      }
      optimizer.step();
      optimizer.zero_grad();
    }
    const auto full = full_state_dict(deep);
    for (const auto& parameter : expected->named_parameters()) {
      EXPECT_TRUE(testing::allclose(full[parameter.key()], parameter.value().detach(), tolerance,
                                    tolerance))
          << parameter.key() << " on rank " << mesh.rank();
    }
  });
}

std::unique_ptr<NoSync> quiet_if(Deep& deep, bool on) {
  return on ? std::make_unique<NoSync>(deep) : nullptr;
}

class Skipped : public ::testing::TestWithParam<DeepKind> {};

TEST_P(Skipped, UnitsAreReducedWithTheStepTheyBelongTo) {
  expect_deep_reference(GetParam(), GetParam() == DeepKind::hybrid ? 4 : 2, false, quiet_if);
}

std::string skipped_name(const ::testing::TestParamInfo<DeepKind>& given) {
  constexpr const char* kNames[] = {"FullyShard", "Kept",      "Narrower", "Hybrid",
                                    "Copies",     "Replicate", "Original", "Flat"};
  return kNames[static_cast<int>(given.param)];
}

INSTANTIATE_TEST_SUITE_P(All, Skipped,
                         ::testing::Values(DeepKind::fully_shard, DeepKind::kept,
                                           DeepKind::narrower, DeepKind::hybrid, DeepKind::copies,
                                           DeepKind::replicate, DeepKind::original, DeepKind::flat),
                         skipped_name);

// A forward of whole parameters does not talk, so ranks may use different units.
TEST(SkippedUnits, MayDifferByRankWhereParametersAreWhole) {
  expect_deep_reference(DeepKind::replicate, 2, true, quiet_if);
}

TEST(SkippedUnits, SumsThatWaitForTheCopiesComeToo_F25) {
  for (const auto kind : {DeepKind::hybrid, DeepKind::copies}) {
    expect_deep_reference(kind, kind == DeepKind::hybrid ? 4 : 2, false, [](Deep& deep, bool on) {
      set_requires_all_reduce(deep, !on);
      return 0;
    });
  }
}

}  // namespace
}  // namespace tessera
