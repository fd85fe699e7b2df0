// A training that is saved and goes on under another way of sharding, another number of ranks, or
// both: its losses are those of the training that was never interrupted.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/testing.h"
#include "tessera/checkpoint.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/training_state.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::expect_losses;
using testing::half_net;
using testing::make_net;
using testing::make_optimizer;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::train;
using testing::Way;

constexpr int kBefore = 3, kAfter = 3;

std::vector<double> losses_of(Net& net, torch::optim::Optimizer& optimizer, int first, int count) {
  std::vector<double> losses;
  for (int i = 0; i < count; ++i) losses.push_back(train(net, optimizer, first + i, 1));
  return losses;
}

std::vector<double> uninterrupted() {
  auto net = make_net({});
  auto optimizer = make_optimizer(net);
  train(net, *optimizer, 0, kBefore);
  return losses_of(net, *optimizer, kBefore, kAfter);
}

enum class Api { full, sharded, kinds, scattered };

// What rank 0 has of a training of `world` ranks, whole.
struct Saved {
  FullState model;
  Value optim;
};

Saved saved_whole(Way way, int world, Api api) {
  Saved saved;
  run_mesh(world, [&](Mesh& mesh) {
    auto net = make_net({});
    shard(net, way, mesh);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, kBefore);
    auto model = full_state_dict(net, {.rank0_only = true});
    Value optim;
    if (api == Api::kinds) {
      const StateDictTypeScope scope(net, {.optim = {.rank0_only = true}});
      optim = optim_state_dict(net, *optimizer);
    } else {
      optim = full_optim_state_dict(net, *optimizer, {.group = mesh});
    }
    if (mesh.rank() == 0) saved = {std::move(model), std::move(optim)};
  });
  return saved;
}

std::vector<double> resumed(const Saved& saved, Way way, const Mesh& mesh, Api api) {
  auto net = half_net();
  shard(net, way, mesh);
  load_full_state_dict(net, saved.model);
  auto optimizer = make_optimizer(net);
  const OptimTarget target{.optim = OptimizerRef(*optimizer), .group = mesh};
  if (api == Api::scattered) {
    const auto given = mesh.rank() == 0 ? std::optional(saved.optim) : std::nullopt;
    load_optimizer_state_dict(*optimizer, scatter_full_optim_state_dict(given, net, target));
  } else if (api == Api::kinds) {
    optim_state_dict_to_load(net, *optimizer, saved.optim, {.load_directly = true});
  } else {
    load_optimizer_state_dict(*optimizer, shard_full_optim_state_dict(saved.optim, net, target));
  }
  return losses_of(net, *optimizer, kBefore, kAfter);
}

class Resume : public ::testing::TestWithParam<std::tuple<Way, Way>> {};

TEST_P(Resume, WholeStatesGoOnElsewhere) {
  const auto [from, to] = GetParam();
  const auto expected = uninterrupted();
  for (const auto api : {Api::full, Api::kinds, Api::scattered}) {
    const auto saved = saved_whole(from, 3, api);
    for (const int world : {1, 2, 4}) {
      run_mesh(world, [&, to = to](Mesh& mesh) {
        expect_losses(resumed(saved, to, mesh, api), expected, std::to_string(world) + " ranks");
      });
    }
  }
}

// Through a checkpoint of the sharded states, into the memory of the new ones.
TEST_P(Resume, ShardedCheckpointsGoOnElsewhere) {
  const auto [from, to] = GetParam();
  const auto expected = uninterrupted();
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(3, [&, from = from](Mesh& mesh) {
    auto net = make_net({});
    shard(net, from, mesh);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, kBefore);
    const StateDictTypeScope scope(net, {.type = StateDictType::sharded});
    save(Value::dict({{"model", state_dict(net)},
                      {"optim", sharded_optim_state_dict(net, *optimizer, {.group = mesh})}}),
         path, mesh.checkpoint_group());
  });
  for (const int world : {2, 4}) {
    run_mesh(world, [&, to = to](Mesh& mesh) {
      auto net = half_net();
      shard(net, to, mesh);
      auto optimizer = make_optimizer(net);
      const StateDictTypeScope scope(net, {.type = StateDictType::sharded});
      train(net, *optimizer, 50, 1);  // so that there are states to load into
      auto tree =
          Value::dict({{"model", state_dict(net)},
                       {"optim", sharded_optim_state_dict(net, *optimizer, {.group = mesh})}});
      load(tree, path, mesh.checkpoint_group());
      load_state_dict(net, tree.at("model"));
      load_optimizer_state_dict(
          *optimizer,
          flatten_sharded_optim_state_dict(tree.at("optim"), net, *optimizer, {.group = mesh}));
      expect_losses(losses_of(net, *optimizer, kBefore, kAfter), expected,
                    std::to_string(world) + " ranks");
    });
  }
}

// A unit has one dtype: the model's is complex, that of the scale is real. FSDP1 takes no complex
// ones, as in PyTorch.
struct ScaleImpl : torch::nn::Module {
  torch::Tensor by;
  explicit ScaleImpl(const torch::Tensor& begin) { by = register_parameter("by", begin.clone()); }
  torch::Tensor forward(const torch::Tensor& x) { return x * by; }
};
TESSERA_MODULE(Scale);

struct WaveImpl : torch::nn::Module {
  torch::Tensor w, b;
  Scale scale{nullptr};
  explicit WaveImpl(double begin) {
    const auto numbers = torch::arange(15.0).sin() * begin;
    w = register_parameter("w", torch::complex(numbers, numbers.flip({0})).reshape({5, 3}));
    b = register_parameter("b", torch::complex(numbers, -numbers).narrow(0, 6, 3).clone());
    scale = register_module("scale", Scale(numbers.narrow(0, 0, 3)));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = torch::matmul(x, w) + b;
    return (scale(torch::real(y * y.conj())) - 1).square().mean();
  }
};
TESSERA_MODULE(Wave);

std::vector<double> losses_of(Wave& wave, AdamW& optimizer, int first, int count) {
  std::vector<double> losses;
  for (int step = first; step < first + count; ++step) {
    const auto numbers = torch::arange(20.0).add(step).cos().reshape({4, 5});
    const auto loss = wave(torch::complex(numbers, numbers * 0.5));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    losses.push_back(loss.item<double>());
  }
  return losses;
}

// 47, 4.6: AdamW's own numbers are compared with Python's in optimizer_ref_test.cpp.
TEST(ResumeComplex, ParametersGoOnElsewhere) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  Wave alone(1);
  AdamW one(sharded_parameters(alone), {.lr = 0.05});
  const auto before = losses_of(alone, one, 0, kBefore);
  const auto expected = losses_of(alone, one, kBefore, kAfter);
  run_mesh(2, [&](Mesh& mesh) {
    Wave wave(1);
    fully_shard(wave->scale, mesh);
    fully_shard(wave, mesh);
    AdamW optimizer(sharded_parameters(wave), {.lr = 0.05});
    expect_losses(losses_of(wave, optimizer, 0, kBefore), before, "sharded");
    for (std::size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(optimizer.state(0, i).exp_avg_sq.scalar_type(),
                optimizer.parameters()[i].local.scalar_type());
    }
    save(TrainingState(wave, optimizer), path, mesh.checkpoint_group());
  });
  for (const int world : {1, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      Wave wave(7);
      fully_shard(wave->scale, mesh);
      fully_shard(wave, mesh);
      AdamW optimizer(sharded_parameters(wave), {.lr = 0.9});
      TrainingState state(wave, optimizer);
      load(state, path, mesh.checkpoint_group());
      expect_losses(losses_of(wave, optimizer, kBefore, kAfter), expected,
                    std::to_string(world) + " ranks");
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, Resume,
                         ::testing::Combine(::testing::Values(Way::replicated, Way::rows, Way::flat,
                                                              Way::original, Way::aligned),
                                            ::testing::Values(Way::replicated, Way::rows, Way::flat,
                                                              Way::original, Way::aligned)),
                         [](const auto& of) {
                           return testing::name_of(std::get<0>(of.param)) + "To" +
                                  testing::name_of(std::get<1>(of.param));
                         });

}  // namespace
}  // namespace tessera
