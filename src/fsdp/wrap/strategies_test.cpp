// Every strategy gives the numbers of training whole (spec T1), however gradients are accumulated.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <string>

#include "fsdp/testing/test_training.h"
#include "tessera/activation_checkpoint.h"
#include "tessera/ddp.h"
#include "tessera/error.h"
#include "tessera/norms.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::kSteps;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::reference;
using testing::run_mesh;

enum class Strategy {
  full_shard,     // E1 FULL_SHARD
  shard_grad_op,  // parameters stay gathered until after backward
  hybrid_shard,   // shards over half of the ranks, two copies
  hybrid_zero2,   // the same, gathered until after backward
  hybrid_copies,  // shards over one rank: copies only, through the sharded path
  no_shard,       // units whose parameters stay whole
  data_parallel,  // one unit, buckets while backward goes on
};
enum class Accumulate { none, no_sync, synced };

void shard(Net& net, const Mesh& mesh, Strategy strategy) {
  const auto all = [&](const auto& apply) {
    for (auto& block : net->blocks) apply(block);
    apply(net);
  };
  const bool zero2 = strategy == Strategy::shard_grad_op || strategy == Strategy::hybrid_zero2;
  ShardOptions options;
  if (zero2) options.reshard_after_forward = false;
  switch (strategy) {
    case Strategy::full_shard:
    case Strategy::shard_grad_op:
      return all([&](auto& module) { fully_shard(module, mesh, options); });
    case Strategy::hybrid_shard:
    case Strategy::hybrid_zero2:
    case Strategy::hybrid_copies: {
      const bool copies = strategy == Strategy::hybrid_copies;
      const auto hybrid = mesh.split(copies                 ? 1
                                     : mesh.size() % 2 == 0 ? mesh.size() / 2
                                                            : mesh.size());
      return all([&](auto& module) { fully_shard(module, hybrid, options); });
    }
    case Strategy::no_shard:
      return all([&](auto& module) { replicate(module, mesh); });
    case Strategy::data_parallel:
      return replicate(net, mesh, {.bucket_bytes = 600, .first_bucket_bytes = 100});
  }
}

using StrategyCase = std::tuple<int, Strategy, Accumulate, bool>;
class Strategies : public ::testing::TestWithParam<StrategyCase> {};

TEST_P(Strategies, EqualSingleProcessOnAllRanksData_T1_T5) {
  const auto [world, strategy, accumulate, tied] = GetParam();
  const int micros = accumulate == Accumulate::none ? 1 : 3;
  const auto expected = reference(world, micros, tied);
  run_mesh(world, [&](Mesh& mesh) {
    auto net = make_net({.tied = tied});
    shard(net, mesh, strategy);
    const auto parameters = sharded_parameters(net);
    torch::optim::SGD optimizer(local_tensors(parameters), testing::sgd_options());
    for (int step = 0; step < kSteps; ++step) {
      net->zero_grad();
      double sum = 0;
      for (int micro = 0; micro < micros; ++micro) {
        const auto rows = batch_of(step, micro, mesh);
        std::optional<NoSync> quiet;
        if (accumulate == Accumulate::no_sync && micro + 1 < micros) quiet.emplace(net);
        auto loss = loss_of(net, rows);
        loss.backward();
        sum += loss.item<double>();
      }
      const double mean = mesh.all_reduce_sum(sum) / world;
      ASSERT_NEAR(mean, expected.losses[step], 2e-6 * expected.losses[step]) << "step " << step;
      ASSERT_NEAR(clip_grad_norm(parameters, 1.0), expected.norms[step], 2e-6) << "step " << step;
      optimizer.step();
    }
    for (const auto& parameter : parameters) {
      auto mine = expected.parameters.at(parameter.name());
      const auto local = parameter.local.detach().cpu();
      if (parameter.sharded) mine = mine.narrow(0, parameter.offset, local.size(0));
      EXPECT_TRUE(testing::allclose(local, mine, 1e-5, 1e-6)) << parameter.name();
    }
    for (const auto& [name, norm] : norms_by_name(parameters, NormOf::parameters)) {
      const auto whole = expected.parameters.at(name).norm().item<double>();
      EXPECT_NEAR(norm, whole, 2e-5 * whole + 1e-6) << name;
    }
    for (const auto& unit : unit_reports(net)) {
      EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
      EXPECT_EQ(unit.reductions, kSteps * (accumulate == Accumulate::synced ? micros : 1u));
    }
  });
}

std::string name_of(const ::testing::TestParamInfo<StrategyCase>& info) {
  constexpr std::array kNames{"FullShard",    "ShardGradOp", "HybridShard", "HybridZero2",
                              "HybridCopies", "NoShard",     "DataParallel"};
  constexpr std::array kAccumulate{"", "NoSync", "Synced"};
  const auto [world, strategy, accumulate, tied] = info.param;
  return std::string(kNames[static_cast<int>(strategy)]) +
         kAccumulate[static_cast<int>(accumulate)] + (tied ? "Tied" : "") + std::to_string(world);
}

INSTANTIATE_TEST_SUITE_P(
    All, Strategies,
    ::testing::Combine(::testing::Values(1, 2, 3, 4),
                       ::testing::Values(Strategy::full_shard, Strategy::shard_grad_op,
                                         Strategy::hybrid_shard, Strategy::hybrid_zero2,
                                         Strategy::hybrid_copies, Strategy::no_shard,
                                         Strategy::data_parallel),
                       ::testing::Values(Accumulate::none, Accumulate::no_sync, Accumulate::synced),
                       ::testing::Bool()),
    name_of);

TEST(Strategies, GatherAsOftenAsTheirKindSays_T6) {
  run_mesh(4, [](Mesh& mesh) {
    const std::vector<std::pair<Strategy, std::uint64_t>> gathers{
        {Strategy::full_shard, 2},   {Strategy::shard_grad_op, 1}, {Strategy::hybrid_shard, 2},
        {Strategy::hybrid_zero2, 1}, {Strategy::no_shard, 0},      {Strategy::data_parallel, 0}};
    for (const auto& [strategy, count] : gathers) {
      auto net = make_net({});
      shard(net, mesh, strategy);
      loss_of(net, batch(0, 0, 1)).backward();
      for (const auto& unit : unit_reports(net)) {
        EXPECT_EQ(unit.gathers, unit.name.empty() ? std::min<std::uint64_t>(count, 1) : count)
            << static_cast<int>(strategy) << " '" << unit.name << "'";
        EXPECT_EQ(unit.reductions, 1u);
      }
    }
  });
}

TEST(Hybrid, CopiesShardOverTheirGroupAndAgree_HY3_HY5) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    EXPECT_EQ(hybrid.shard.rank(), mesh.rank() % 2);
    EXPECT_EQ(hybrid.replicate.rank(), mesh.rank() / 2);
    EXPECT_THROW(static_cast<void>(mesh.split(3)), Error);
    nn::Linear linear(2, 5);
    sync_module_states(linear, mesh);
    fully_shard(linear, hybrid);
    const auto weight = sharded_parameters(linear)[0];
    EXPECT_EQ(weight.local.size(0), mesh.rank() % 2 == 0 ? 3 : 2);
    linear->zero_grad();
    call_module(linear, torch::full({1, 2}, mesh.rank() + 1.0f)).sum().backward();
    EXPECT_TRUE(testing::equal(weight.local.grad(), torch::full_like(weight.local, 2.5f)));
  });
}

TEST(Replicate, LeavesTheModulesOwnParametersToAnyOptimizer) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 2);
    sync_module_states(linear, mesh);
    testing::move_to(mesh.device(), *linear);
    const auto* address = linear->weight.data_ptr();
    replicate(linear, mesh);
    EXPECT_EQ(linear->weight.data_ptr(), address);
    EXPECT_FALSE(sharded_parameters(linear)[0].sharded);
    torch::optim::SGD optimizer(linear->parameters(), 1.0);
    const auto before = linear->bias.detach().clone();
    call_module(linear, torch::ones({mesh.rank() + 1, 3})).sum().backward();
    optimizer.step();
    EXPECT_TRUE(testing::allclose(before - linear->bias.detach(), torch::full({2}, 1.5f)));
  });
}

// One output a call chooses, so that ranks may use different parameters.
struct PickImpl : nn::Module {
  torch::Tensor scalar, a, b;
  PickImpl() {
    scalar = register_parameter("scalar", torch::tensor(2.0f));
    a = register_parameter("a", torch::ones({3}));
    b = register_parameter("b", torch::ones({3}));
  }
  torch::Tensor forward(bool with_a) { return with_a ? (a * scalar).sum() : 3 * scalar; }
};
TESSERA_MODULE(Pick);

TEST(Replicate, UsesOfSomeRanksCountAndOfNoneDoNot) {
  run_mesh(2, [](Mesh& mesh) {
    Pick pick;
    replicate(pick, mesh, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    for (int round = 0; round < 2; ++round) {
      pick->zero_grad();
      pick(mesh.rank() == 1).backward();
      EXPECT_FLOAT_EQ(pick->scalar.grad().item<float>(), 3.0f);
      EXPECT_TRUE(testing::equal(pick->a.grad(), torch::ones({3})));
      EXPECT_FALSE(pick->b.grad().defined());
    }
  });
}

struct TwiceImpl : nn::Module {
  nn::Linear inner{nullptr};
  TwiceImpl() { inner = register_module("inner", nn::Linear(3, 3)); }
  torch::Tensor forward(torch::Tensor x) { return inner(activation_checkpoint(inner, x)); }
};
TESSERA_MODULE(Twice);

// Seed 5046 of the generated trainings: the error named nothing.
TEST(Replicate, AGradientThatComesAgainNamesItsParameter) {
  run_mesh(2, [](Mesh& mesh) {
    Twice model;
    replicate(model, mesh, {.bucket_bytes = 1, .first_bucket_bytes = 1});
    const auto x = torch::ones({1, 3}, torch::requires_grad());
    try {
      model(x).sum().backward();
      ADD_FAILURE() << "no Error";
    } catch (const Error& error) {
      EXPECT_EQ(error.key(), "inner.bias");
      EXPECT_THAT(error.message(), ::testing::HasSubstr("of unit '"));
    }
  });
}

// A gradient's memory that somebody else sees is not averaged in place.
TEST(Replicate, GradientsThatAHookKeepStayThoseOfTheirRank) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 2);
    std::vector<torch::Tensor> kept;
    for (const auto& parameter : linear->parameters()) {
      parameter.register_hook([&kept](const torch::Tensor& gradient) {
        kept.push_back(gradient.detach());
        return gradient;
      });
    }
    replicate(linear, mesh);
    call_module(linear, torch::ones({mesh.rank() + 1, 3})).sum().backward();
    ASSERT_EQ(kept.size(), 2);
    for (const auto& gradient : kept)
      EXPECT_TRUE(testing::equal(gradient, torch::full_like(gradient, mesh.rank() + 1)));
    for (const auto& parameter : linear->parameters())
      EXPECT_TRUE(testing::equal(parameter.grad(), torch::full_like(parameter, 1.5)));
  });
}

struct LargeImpl : nn::Module {
  nn::Linear first{nullptr}, last{nullptr};
  torch::Tensor unused;
  LargeImpl() {
    first = register_module("first", nn::Linear(601, 503));
    unused = register_parameter("unused", torch::ones({300, 401}));
    last = register_module("last", nn::Linear(503, 307));
  }
  torch::Tensor forward(const torch::Tensor& x) { return last(first(x)); }
};
TESSERA_MODULE(Large);

// Units of many rounds of shared memory, whose parts end anywhere in a parameter.
TEST(LargeUnits, GradientsAreTheAveragesOfAllRanks) {
  for (const std::string kind : {"rows", "flat", "aligned", "whole"}) {
    run_mesh(3, [&](Mesh& mesh) {
      Large model, alone;
      {
        const torch::NoGradGuard no_grad;
        for (auto* large : {&model, &alone}) {
          double value = 0;
          for (auto& parameter : (*large)->parameters())
            parameter.copy_(
                torch::arange(parameter.numel()).view_as(parameter).remainder(7 + value++) * 0.01);
        }
      }
      const auto input = [](int rank) {
        return torch::arange(2 * 601).view({2, 601}).remainder(5 + rank) * 0.1;
      };
      auto loss = alone(input(0)).square().mean();
      for (int rank = 1; rank < 3; ++rank) loss = loss + alone(input(rank)).square().mean();
      (loss / 3).backward();
      if (kind == "whole") replicate(model, mesh);
      if (kind == "rows") fully_shard(model, mesh);
      if (kind == "aligned") fully_shard(model, mesh, {.layout = ShardLayout::flat});
      std::optional<FullyShardedDataParallel<Large>> wrapped;
      if (kind == "flat")
        wrapped.emplace(model, mesh, FullyShardedOptions{.use_orig_params = true});
      for (int step = 0; step < 2; ++step) {
        model->zero_grad();
        (wrapped ? (*wrapped)(input(mesh.rank())) : model(input(mesh.rank())))
            .square()
            .mean()
            .backward();
        const auto expected = alone->named_parameters();
        for (const auto& parameter : sharded_parameters(model)) {
          const auto& mine = parameter.local.grad();
          auto whole = expected[parameter.name()].grad();
          if (kind == "flat" && parameter.local.numel() == 0) {
            EXPECT_FALSE(mine.defined()) << parameter.name();
            continue;
          }
          ASSERT_EQ(mine.defined(), whole.defined()) << kind << " " << parameter.name();
          if (!whole.defined()) continue;
          if (kind == "rows") whole = whole.narrow(0, parameter.offset, mine.size(0));
          if (kind == "flat" || kind == "aligned")
            whole = whole.view({-1}).narrow(0, parameter.offset, mine.numel());
          EXPECT_TRUE(testing::allclose(mine, whole, 1e-5, 1e-6))
              << kind << " " << parameter.name();
        }
      }
    });
  }
}

struct NormedImpl : nn::Module {
  nn::BatchNorm1d norm{nullptr};
  NormedImpl() { norm = register_module("norm", nn::BatchNorm1d(2)); }
  torch::Tensor forward(const torch::Tensor& x) { return norm(x); }
};
TESSERA_MODULE(Normed);

TEST(DistributedDataParallel, StartsFromRankZeroAndKeepsItsBuffers) {
  run_mesh(2, [](Mesh& mesh) {
    Normed module;
    {
      const torch::NoGradGuard no_grad;
      module->norm->weight.fill_(mesh.rank() + 5);
      module->norm->running_mean.fill_(mesh.rank() + 7);
    }
    DistributedDataParallel<Normed> model(module, mesh);
    EXPECT_EQ(model->norm->weight[0].item<float>(), 5);
    EXPECT_EQ(model->norm->running_mean[0].item<float>(), 7);
    const auto x = torch::arange(4).view({2, 2}).to(torch::kFloat) + 10 * mesh.rank();
    model(x).sum().backward();
    const auto local = model->norm->running_mean[0].item<float>();
    {
      const auto quiet = model.no_sync();
      model(x).sum().backward();
    }
    // The second forward began with rank 0's mean: 0.9 * (0.9 * 7 + 0.1 * 1) + 0.1 * mean(x).
    const double mine = 1.0 + 10 * mesh.rank();
    EXPECT_NEAR(local, 0.9 * 7 + 0.1 * mine, 1e-5);
    EXPECT_NEAR(model->norm->running_mean[0].item<float>(), 0.9 * (0.9 * 7 + 0.1) + 0.1 * mine,
                1e-5);
  });
}

TEST(Clip, RefusesANormOfNoType_CG9) {
  nn::Linear linear(2, 2);
  EXPECT_THROW(clip_grad_norm(sharded_parameters(linear), 1.0, 0.0), Error);
  EXPECT_THROW(clip_grad_norm(sharded_parameters(linear), 1.0, -1.0), Error);
}

// Four ranks share three rows: the last one has none, of a model that has no others.
TEST(Clip, RanksThatHoldNothingHaveTheLargestMagnitudeToo_CG2) {
  run_mesh(4, [](Mesh& mesh) {
    nn::Linear linear(4, 3);
    sync_module_states(linear, mesh);
    fully_shard(linear, mesh);
    call_module(linear, torch::full({1, 4}, 2.0F)).sum().backward();
    EXPECT_NEAR(
        clip_grad_norm(sharded_parameters(linear), 1.0, std::numeric_limits<double>::infinity()),
        2.0, 1e-6);
  });
}

TEST(Clip, TakesNormsOfShortTypesInFloat_CG2) {
  nn::Linear linear(300, 900);
  linear->to(torch::kBFloat16);
  for (const auto& parameter : linear->parameters())
    parameter.mutable_grad() = torch::ones_like(parameter);
  EXPECT_NEAR(clip_grad_norm(sharded_parameters(linear), 1e9), std::sqrt(300 * 900 + 900), 1e-3);
}

TEST(Clip, EveryNormEqualsTorch_T10) {
  for (const auto strategy : {Strategy::full_shard, Strategy::hybrid_shard, Strategy::no_shard}) {
    for (const double p : {1.0, 2.0, 3.0, std::numeric_limits<double>::infinity()}) {
      auto plain = make_net({});
      loss_of(plain, batch(0, 0, 2)).backward();
      const auto parameters = local_tensors(sharded_parameters(plain));
      const double expected = nn::utils::clip_grad_norm_(parameters, 0.1, p);
      run_mesh(2, [&](Mesh& mesh) {
        auto net = make_net({});
        shard(net, mesh, strategy);
        loss_of(net, batch_of(0, 0, mesh)).backward();
        const auto mine = sharded_parameters(net);
        EXPECT_NEAR(clip_grad_norm(mine, 0.1, p), expected, 1e-5 * expected) << p;
        for (std::size_t i = 0; i < mine.size(); ++i) {
          auto whole = parameters[i].grad();
          if (mine[i].sharded) whole = whole.narrow(0, mine[i].offset, mine[i].local.size(0));
          EXPECT_TRUE(testing::allclose(mine[i].local.grad(), whole, 1e-4, 1e-7)) << mine[i].name();
        }
      });
    }
  }
}

// One module's parameters are shared by all ranks, another one's by two.
TEST(Hybrid, GroupsMayDifferAmongUnits_HY9) {
  auto plain = make_net({});
  loss_of(plain, batch(0, 0, 4)).backward();
  const auto expected = sharded_parameters(plain);
  run_mesh(4, [&](Mesh& mesh) {
    auto net = make_net({});
    const auto hybrid = mesh.split(2);
    fully_shard(net->blocks[0], mesh);
    fully_shard(net->blocks[1], hybrid);
    fully_shard(net, hybrid);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    const auto parameters = sharded_parameters(net);
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& mine = parameters[i].local.grad();
      const auto whole = expected[i].local.grad().narrow(0, parameters[i].offset, mine.size(0));
      EXPECT_TRUE(testing::allclose(mine, whole, 1e-4, 1e-6)) << parameters[i].name();
      EXPECT_EQ(parameters[i].mesh->size(), parameters[i].name().starts_with("block0") ? 4 : 2);
    }
  });
}

// A loss in chunks, each with its own backward: the output layer is reduced once a chunk.
TEST(ChunkedLoss, IsOneReductionACall_9_5) {
  constexpr int kChunks = 3;
  const auto x = torch::arange(24, torch::kFloat).view({6, 4}) / 24;
  run_mesh(2, [&](Mesh& mesh) {
    nn::Linear plain(4, 5);
    sync_module_states(plain, mesh);
    nn::Linear head(4, 5);
    {
      const torch::NoGradGuard no_grad;
      head->weight.copy_(plain->weight);
      head->bias.copy_(plain->bias);
    }
    fully_shard(head, mesh);
    plain(x).square().sum().backward();
    for (const auto& chunk : x.chunk(kChunks)) call_module(head, chunk).square().sum().backward();
    EXPECT_EQ(unit_reports(head)[0].reductions, static_cast<std::uint64_t>(kChunks));
    const auto weight = sharded_parameters(head)[0];
    EXPECT_TRUE(testing::allclose(
        weight.local.grad(), plain->weight.grad().narrow(0, weight.offset, weight.local.size(0)),
        1e-5, 1e-6));
  });
}

}  // namespace
}  // namespace tessera
