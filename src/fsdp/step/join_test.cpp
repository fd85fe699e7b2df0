// Join: ranks with different numbers of batches train like one process that has them all, and like
// PyTorch's DistributedDataParallel under its Join.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "tessera/checkpoint.h"
#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/sync_batchnorm.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::error_of;
using ::testing::HasSubstr;
using testing::run_mesh;
using testing::with_values;

// Two layers, each of which may be a unit.
struct JoinLayersImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};
  JoinLayersImpl() {
    up = register_module("up", nn::Linear(4, 5));
    down = register_module("down", nn::Linear(5, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return call_module(down, torch::tanh(call_module(up, x)));
  }
};
TESSERA_MODULE(JoinLayers);

JoinLayers join_layers() {
  auto layers = with_values(JoinLayers(), 21);
  layers->to(torch::kDouble);
  return layers;
}

torch::Tensor join_input(int rank, int number) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 * rank + number);
  return torch::randn({3, 4}, generator, torch::kDouble);
}

constexpr AdamWOptions kJoinAdamW{.lr = 0.05};

// How many batches each rank has.
using BatchCounts = std::vector<int>;
int world_of(const BatchCounts& counts) {
  return static_cast<int>(counts.size());
}

// One process with the batches of all, `micros` of each rank in a step.
std::map<std::string, torch::Tensor> trained_alone(const BatchCounts& counts, bool by_all,
                                                   int micros = 1) {
  auto layers = join_layers();
  const auto parameters = sharded_parameters(layers);
  AdamW optimizer(parameters, kJoinAdamW);
  const int most = *std::ranges::max_element(counts);
  for (int first = 0; first < most; first += micros) {
    optimizer.zero_grad();
    for (int number = first; number < std::min(most, first + micros); ++number) {
      const auto active = std::ranges::count_if(counts, [&](int count) { return number < count; });
      for (int rank = 0; rank < world_of(counts); ++rank) {
        if (number >= counts[rank]) continue;
        const auto loss = layers(join_input(rank, number)).square().mean();
        (loss / (by_all ? world_of(counts) : static_cast<int>(active))).backward();
      }
    }
    optimizer.step();
  }
  std::map<std::string, torch::Tensor> values;
  for (const auto& parameter : parameters) values[parameter.name()] = parameter.local.detach();
  return values;
}

enum class JoinKind { fully_shard, hybrid, original, flat, no_shard, replicate, replicate_each };

void wrap_layers(JoinLayers& layers, const Mesh& mesh, JoinKind kind) {
  const auto fsdp1 = [&](bool original, ShardingStrategy strategy) {
    FullyShardedDataParallel<JoinLayers>(
        layers, mesh, {.sharding_strategy = strategy, .use_orig_params = original});
  };
  switch (kind) {
    case JoinKind::fully_shard:
      fully_shard(layers->up, mesh);
      return fully_shard(layers, mesh);
    case JoinKind::hybrid:
      return fully_shard(layers, mesh.split(mesh.size() / 2));
    case JoinKind::original:
      return fsdp1(true, ShardingStrategy::full_shard);
    case JoinKind::flat:
      return fsdp1(false, ShardingStrategy::shard_grad_op);
    case JoinKind::no_shard:
      return fsdp1(true, ShardingStrategy::no_shard);
    case JoinKind::replicate_each:
      replicate(layers->up, mesh);
      replicate(layers->down, mesh);
      [[fallthrough]];
    case JoinKind::replicate:
      return replicate(layers, mesh);
  }
}

void expect_values(const JoinLayers& layers, const std::map<std::string, torch::Tensor>& expected) {
  const FullParams whole(layers);
  for (const auto& entry : layers->named_parameters()) {
    EXPECT_TRUE(testing::allclose(entry.value(), expected.at(entry.key()), 1e-10, 1e-10))
        << entry.key() << entry.value() << expected.at(entry.key());
  }
}

// Numbers that no model survives, where `broken`; else the last batch.
torch::Tensor stand_in(const BatchCounts& counts, int rank, bool broken) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  if (broken) return torch::full({3, 4}, nan, torch::kDouble);
  if (counts[rank] == 0) return torch::zeros({3, 4}, torch::kDouble);
  return join_input(rank, counts[rank] - 1);
}

using JoinCase = std::tuple<JoinKind, BatchCounts, bool, bool>;
class Joined : public ::testing::TestWithParam<JoinCase> {};

TEST_P(Joined, EqualsOneProcessWithAllBatches) {
  const auto [kind, counts, by_all, same_host] = GetParam();
  const auto expected = trained_alone(counts, by_all);
  for (const bool broken : {false, true}) {
    run_mesh(
        world_of(counts),
        [&](Mesh& mesh) {
          auto layers = join_layers();
          wrap_layers(layers, mesh, kind);
          AdamW optimizer(sharded_parameters(layers), kJoinAdamW);
          const int count = counts[mesh.rank()];
          int steps = 0;
          {
            Join join({layers}, mesh, {.divide_by_initial_world_size = by_all});
            for (; join.next(steps < count); ++steps) {
              const auto input = steps < count ? join_input(mesh.rank(), steps)
                                               : stand_in(counts, mesh.rank(), broken);
              layers(input).square().mean().backward();
              optimizer.step();
              optimizer.zero_grad();
            }
          }
          EXPECT_EQ(steps, *std::ranges::max_element(counts));
          expect_values(layers, expected);
        },
        std::chrono::seconds(30), same_host);
  }
}

std::string name_of_join(const ::testing::TestParamInfo<JoinCase>& given) {
  constexpr std::array kNames{"FullyShard", "Hybrid",    "Original",     "Flat",
                              "NoShard",    "Replicate", "ReplicateEach"};
  const auto& [kind, counts, by_all, same_host] = given.param;
  return std::string(kNames[static_cast<int>(kind)]) + std::to_string(counts.size()) +
         (by_all ? "ByAll" : "ByThoseWithInput") + (same_host ? "" : "Gloo");
}

INSTANTIATE_TEST_SUITE_P(
    All, Joined,
    ::testing::Combine(::testing::Values(JoinKind::fully_shard, JoinKind::hybrid,
                                         JoinKind::original, JoinKind::flat, JoinKind::no_shard,
                                         JoinKind::replicate, JoinKind::replicate_each),
                       ::testing::Values(BatchCounts{5, 7}, BatchCounts{5, 7, 0, 6}),
                       ::testing::Bool(), ::testing::Bool()),
    name_of_join);

// A step of two batches, of which a rank may have one.
TEST(Join, BatchesThatAccumulateCountOneByOne) {
  const BatchCounts counts{3, 6};
  for (const bool by_all : {true, false}) {
    const auto expected = trained_alone(counts, by_all, 2);
    for (const auto kind : {JoinKind::fully_shard, JoinKind::flat, JoinKind::replicate}) {
      run_mesh(2, [&](Mesh& mesh) {
        auto layers = join_layers();
        wrap_layers(layers, mesh, kind);
        AdamW optimizer(sharded_parameters(layers), kJoinAdamW);
        Join join({layers}, mesh, {.divide_by_initial_world_size = by_all});
        for (int at = 0; join.next(at < counts[mesh.rank()]); ++at) {
          {
            std::optional<NoSync> quiet;
            if (at % 2 == 0) quiet.emplace(layers);
            layers(join_input(mesh.rank(), at)).square().mean().backward();
          }
          if (at % 2 == 0) continue;
          optimizer.step();
          optimizer.zero_grad();
        }
        expect_values(layers, expected);
      });
    }
  }
}

// Not only at the end; and what was frozen at first.
TEST(Join, ARankMayLackInputInTheMiddle) {
  run_mesh(2, [](Mesh& mesh) {
    auto layers = join_layers();
    replicate(layers, mesh);
    layers->down->bias.set_requires_grad(false);
    Join join({layers}, mesh);
    for (int step = 0; step < 3; ++step) {
      ASSERT_TRUE(join.next(mesh.rank() == 0 || step == 1));
      layers->zero_grad();
      layers(join_input(mesh.rank(), step)).square().mean().backward();
      if (step == 0) layers->down->bias.set_requires_grad(true);
    }
    auto alone = join_layers();
    (alone(join_input(0, 2)).square().mean() / 2).backward();
    for (const auto& entry : layers->named_parameters()) {
      EXPECT_TRUE(testing::allclose(entry.value().grad(),
                                    alone->named_parameters()[entry.key()].grad(), 1e-10, 1e-10))
          << entry.key();
    }
  });
}

TEST(Join, EveryBatchCountsWhenItIsGone) {
  run_mesh(2, [](Mesh& mesh) {
    auto layers = join_layers();
    replicate(layers, mesh);
    {
      Join join({layers}, mesh, {.divide_by_initial_world_size = false});
      ASSERT_TRUE(join.next(mesh.rank() == 0));
    }
    layers(join_input(mesh.rank(), 0)).square().mean().backward();
    auto alone = join_layers();
    for (const int rank : {0, 1}) (alone(join_input(rank, 0)).square().mean() / 2).backward();
    EXPECT_TRUE(
        testing::allclose(layers->up->weight.grad(), alone->up->weight.grad(), 1e-10, 1e-10));
  });
}

std::size_t hooks_of(const torch::Tensor& parameter) {
  const auto& hooks = torch::autograd::impl::get_autograd_meta(parameter)->cpp_hooks_list_;
  return hooks ? hooks->size() : 0;
}

// A training has one in each epoch. A hook of the caller's keeps its number.
TEST(Join, LeavesNoHooksBehind) {
  run_mesh(2, [](Mesh& mesh) {
    auto layers = join_layers();
    replicate(layers, mesh);
    const auto epoch = [&](bool hooks_in_between) {
      std::optional<unsigned> own;
      {
        Join join({layers}, mesh);
        ASSERT_TRUE(join.next(mesh.rank() == 0));
        layers(join_input(mesh.rank(), 0)).square().mean().backward();
        if (hooks_in_between)
          own = layers->up->weight.register_hook([](const torch::Tensor& g) { return 3 * g; });
      }
      if (!own) return;
      layers->zero_grad();
      layers(join_input(mesh.rank(), 1)).square().mean().backward();
      const auto tripled = layers->up->weight.grad().clone();
      layers->up->weight.remove_hook(*own);
      layers->zero_grad();
      layers(join_input(mesh.rank(), 1)).square().mean().backward();
      EXPECT_TRUE(testing::allclose(tripled, 3 * layers->up->weight.grad()));
    };
    layers(join_input(mesh.rank(), 0)).square().mean().backward();
    const auto before = hooks_of(layers->up->weight);
    for (int i = 0; i < 3; ++i) epoch(false);
    EXPECT_EQ(hooks_of(layers->up->weight), before);
    epoch(true);
    const auto with_own = hooks_of(layers->up->weight);
    epoch(false);
    EXPECT_EQ(hooks_of(layers->up->weight), with_own);
  });
}

TEST(Join, EarlyTerminationThrowsOnAllRanks) {
  run_mesh(2, [](Mesh& mesh) {
    auto layers = join_layers();
    replicate(layers, mesh);
    Join join({layers}, mesh, {.throw_on_early_termination = true});
    EXPECT_TRUE(join.next(true));
    EXPECT_THAT(error_of([&] { static_cast<void>(join.next(mesh.rank() == 1)); }),
                HasSubstr("mismatch: 1 of 2 ranks have no more input"));
  });
  run_mesh(2, [](Mesh& mesh) {
    auto layers = join_layers();
    Join join({layers}, mesh, {.throw_on_early_termination = true});
    EXPECT_TRUE(join.next(true));
    EXPECT_FALSE(join.next(false));
  });
}

// Each rank's own: what the ranks that have input see is theirs.
TEST(Join, StandInsLeaveBuffersAsTheyWere) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4));
    net->to(torch::kDouble);
    replicate(net, mesh);
    auto means = [&] { return net->named_buffers()["1.running_mean"].clone(); };
    torch::Tensor before = means(), seen;
    {
      Join join({net}, mesh);
      ASSERT_TRUE(join.next(mesh.rank() == 0));
      call_module(net, join_input(mesh.rank(), 0)).square().mean().backward();
      seen = means();
      EXPECT_FALSE(testing::equal(seen, before));
      ASSERT_TRUE(join.next(mesh.rank() == 0));
      EXPECT_TRUE(testing::equal(means(), mesh.rank() == 0 ? seen : before));
      call_module(net, join_input(mesh.rank(), 1)).square().mean().backward();
      seen = means();
    }
    EXPECT_TRUE(testing::equal(means(), mesh.rank() == 0 ? seen : before));
  });
}

// Also at once, and those that nothing has changed may be views that nobody can write.
TEST(Join, BuffersComeBackWhenTheyAreAskedFor) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = nn::Sequential(nn::Linear(4, 4), nn::BatchNorm1d(4));
    net->to(torch::kDouble);
    net->register_buffer("mask", torch::ones({1, 1}).expand({4, 4}));
    replicate(net, mesh);
    const auto before = net->named_buffers()["1.running_mean"].clone();
    Join join({net}, mesh);
    ASSERT_TRUE(join.next(mesh.rank() == 0));
    call_module(net, join_input(mesh.rank(), 0)).square().mean().backward();
    join.restore_buffers();
    EXPECT_EQ(testing::equal(net->named_buffers()["1.running_mean"], before), mesh.rank() == 1);
  });
}

// Frozen and thawed between two batches through what the optimizer has.
TEST(Join, StandInsOfThawedParametersCountNothing) {
  for (const auto kind : {JoinKind::fully_shard, JoinKind::original, JoinKind::replicate}) {
    run_mesh(2, [&](Mesh& mesh) {
      const auto gradient = [&](bool is_thawed) {
        auto layers = join_layers();
        wrap_layers(layers, mesh, kind);
        const auto parameters = sharded_parameters(layers);
        Join join({layers}, mesh);
        const auto step = [&](bool has_input) {
          EXPECT_TRUE(join.next(has_input));
          call_module(layers, join_input(mesh.rank(), 0)).square().mean().backward();
        };
        for (const auto& parameter : parameters) {
          if (is_thawed)
            torch::Tensor(parameter.local).requires_grad_(parameter.name() != "up.weight");
        }
        if (is_thawed) step(true);
        layers->zero_grad();
        for (const auto& parameter : parameters) {
          torch::Tensor(parameter.local).mutable_grad() = torch::Tensor();
          torch::Tensor(parameter.local).requires_grad_(true);
        }
        step(mesh.rank() == 0);
        double sum = 0;
        for (const auto& parameter : parameters) {
          const auto& mine = parameter.local.grad();
          if (mine.defined()) sum += mine.sum().item<double>();
        }
        return kind == JoinKind::replicate ? sum : mesh.all_reduce_sum(sum);
      };
      EXPECT_NEAR(gradient(true), gradient(false), 1e-12);
    });
  }
}

// A function that gives no gradient gives none to a stand-in.
struct NoGradient : torch::autograd::Function<NoGradient> {
  static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list&) {
    return {torch::Tensor()};
  }
};

struct HalfLearningImpl : nn::Module {
  nn::Linear up{nullptr}, down{nullptr};
  HalfLearningImpl() {
    up = register_module("up", nn::Linear(4, 5));
    down = register_module("down", nn::Linear(5, 3));
  }
  torch::Tensor forward(const torch::Tensor& x) { return down(NoGradient::apply(up(x))); }
};
TESSERA_MODULE(HalfLearning);

TEST(Join, TakesGradientsThatAreNone) {
  for (const bool by_all : {true, false}) {
    run_mesh(2, [&](Mesh& mesh) {
      HalfLearning layers;
      fully_shard(layers, mesh);
      Join join({layers}, mesh, {.divide_by_initial_world_size = by_all});
      ASSERT_TRUE(join.next(mesh.rank() == 0));
      EXPECT_NO_THROW(call_module(layers, torch::ones({2, 4})).square().mean().backward());
    });
  }
}

// A stand-in is no batch for the statistics of all ranks, nor for what goes back through them.
TEST(Join, StandInsDoNotCountInSyncBatchNorm) {
  run_mesh(2, [](Mesh& mesh) {
    const auto make = [&](const Mesh& over) {
      SyncBatchNorm norm(nn::BatchNormOptions(4), over);
      norm->to(torch::kDouble);
      return norm;
    };
    auto norm = make(mesh), alone = make(Mesh());
    replicate(norm, mesh);
    const bool is_active = mesh.rank() == 0;
    const auto input = join_input(0, 0).requires_grad_(), same = join_input(0, 0).requires_grad_();
    const auto weights = join_input(0, 1);
    const auto expected = alone(same);
    (expected * weights).sum().backward();
    {
      Join join({norm}, mesh);
      ASSERT_TRUE(join.next(is_active));
      const auto stand_in =
          torch::full({3, 4}, std::numeric_limits<double>::quiet_NaN(), torch::kDouble)
              .requires_grad_();
      const auto output = call_module(norm, is_active ? input : stand_in);
      (output * weights.to(output.device())).sum().backward();
      if (is_active) {
        EXPECT_TRUE(testing::allclose(output, expected, 1e-12, 1e-12));
        EXPECT_TRUE(testing::allclose(input.grad(), same.grad(), 1e-12, 1e-12));
      }
    }
    EXPECT_TRUE(testing::allclose(norm->running_mean, alone->running_mean, 1e-12, 1e-12));
    EXPECT_TRUE(testing::allclose(norm->running_var, alone->running_var, 1e-12, 1e-12));
    EXPECT_TRUE(norm->counts);
  });
}

// PyTorch ----------------------------------------------------------------------------------------

struct JoinGoldenImpl : nn::Module {
  torch::Tensor first, second;
  explicit JoinGoldenImpl(const Value& start) {
    const auto take = [&](const char* name) {
      return register_parameter(name, tensor_of(start.at(name).as_tensor()).clone());
    };
    first = take("first");
    second = take("second");
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::matmul(torch::tanh(torch::matmul(x, first)), second);
  }
};
TESSERA_MODULE(JoinGolden);

// The batches of tests/golden/make/join.py.
torch::Tensor golden_batch(int rank, int number) {
  return torch::sin(torch::arange(20, torch::kDouble) + 100 * rank + 10 * number).view({5, 4});
}

TEST(Join, EqualsPyTorchsJoin) {
  const auto golden = Checkpoint::open(std::string(TESSERA_TEST_DATA) + "/golden/join.pt").load();
  const BatchCounts counts{5, 7};
  for (const bool by_all : {true, false}) {
    run_mesh(2, [&](Mesh& mesh) {
      DistributedDataParallel<JoinGolden> model(JoinGolden(golden.at("start")), mesh);
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(0.05));
      Join join({model.module()}, mesh, {.divide_by_initial_world_size = by_all});
      const int count = counts[mesh.rank()];
      for (int at = 0; join.next(at < count); ++at) {
        optimizer.zero_grad();
        model(golden_batch(mesh.rank(), std::min(at, count - 1))).square().mean().backward();
        optimizer.step();
      }
      const auto end = golden.at(by_all ? "by all ranks" : "by those with input");
      for (const auto& entry : model->named_parameters()) {
        EXPECT_TRUE(testing::allclose(entry.value(), tensor_of(end.at(entry.key()).as_tensor()),
                                      1e-10, 1e-10))
            << entry.key();
      }
    });
  }
}

}  // namespace
}  // namespace tessera
