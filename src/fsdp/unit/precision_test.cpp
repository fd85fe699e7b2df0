// Mixed precision: what is computed, reduced and kept in which dtype (spec F5, T7).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <vector>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/counting_transport.h"
#include "fsdp/testing/test_model.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::run_mesh;
using testing::with_values;

// Remembers the dtypes that its forward saw.
struct ProbeImpl : nn::Module {
  nn::Linear linear{nullptr};
  torch::Tensor table;
  at::ScalarType input = at::kDouble, weight = at::kDouble, index = at::kDouble;
  ProbeImpl() {
    linear = register_module("linear", nn::Linear(4, 3));
    table = register_buffer("table", torch::ones({3}));
  }
  torch::Tensor forward(const torch::Tensor& x, const torch::Tensor& places) {
    input = x.scalar_type();
    weight = linear->weight.scalar_type();
    index = places.scalar_type();
    return linear->forward(x).index_select(0, places) * table.to(weight);
  }
};
TESSERA_MODULE(Probe);

Probe make_probe() {
  return with_values(Probe(), 11);
}

torch::Tensor half_input_of(int rank) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(40 + rank);
  return torch::randn({2, 4}, generator);
}

TEST(MixedPrecision, ComputesLowAndKeepsShardsWhole_F5_T7) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(probe, mesh,
                {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                     .reduce_dtype = torch::kFloat,
                                     .output_dtype = torch::kFloat}});
    auto x = half_input_of(mesh.rank()).requires_grad_();
    const auto y = probe(x, torch::tensor({1, 0}));
    EXPECT_EQ(probe->input, at::kBFloat16);
    EXPECT_EQ(probe->weight, at::kBFloat16);
    EXPECT_EQ(probe->index, at::kLong);  // only floating-point inputs are cast
    EXPECT_EQ(probe->table.scalar_type(), at::kFloat);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    y.square().sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    for (const auto& parameter : sharded_parameters(probe)) {
      EXPECT_EQ(parameter.local.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.local.grad().scalar_type(), at::kFloat);
    }
    const auto state = model_state(probe);
    EXPECT_EQ(state.at("linear.weight").as_tensor().dtype, DType::float32);
  });
}

// The average of both ranks' bfloat16 gradients, reduced in `reduce`.
std::vector<torch::Tensor> expected_gradients(at::ScalarType reduce) {
  std::vector<torch::Tensor> sums;
  for (int rank = 0; rank < 2; ++rank) {
    auto probe = make_probe();
    probe->to(torch::kBFloat16);
    probe(half_input_of(rank).to(torch::kBFloat16), torch::tensor({1, 0}))
        .square()
        .sum()
        .backward();
    const auto parameters = probe->parameters();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto gradient = parameters[i].grad().to(reduce);
      if (rank == 0) {
        sums.push_back(gradient);
      } else {
        sums[i] = ((sums[i] + gradient).to(torch::kFloat) / 2);
      }
    }
  }
  return sums;
}

TEST(MixedPrecision, ReducesInTheReduceDtype_MP1) {
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    const auto expected = expected_gradients(reduce);
    run_mesh(2, [&](Mesh& mesh) {
      auto probe = make_probe();
      MixedPrecision precision{.param_dtype = torch::kBFloat16};
      if (reduce == at::kFloat) precision.reduce_dtype = reduce;
      fully_shard(probe, mesh, {.mixed_precision = precision});
      probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).square().sum().backward();
      const auto parameters = sharded_parameters(probe);
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        const auto mine = expected[i].narrow(0, parameters[i].offset, parameters[i].local.size(0));
        EXPECT_TRUE(testing::equal(parameters[i].local.grad(), mine)) << parameters[i].name();
      }
    });
  }
}

TEST(MixedPrecision, AccumulatesInTheReduceDtypeWithoutSync_P10) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(
        probe, mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kFloat}});
    const auto backward = [&](double scale) {
      (probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).sum() * scale).backward();
    };
    // 256 + 1 is 256 in bfloat16: the small gradient would be lost.
    {
      const NoSync quiet(probe);
      backward(256);
      EXPECT_EQ(unit_reports(probe)[0].reductions, 0u);
    }
    backward(1);
    const auto bias = sharded_parameters(probe)[1];
    EXPECT_TRUE(testing::equal(bias.local.grad(), torch::full_like(bias.local, 2 * 257.0)));
  });
}

TEST(MixedPrecision, InputsStayWhenAskedTo_O5) {
  run_mesh(1, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(
        probe, mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false}});
    EXPECT_ANY_THROW(probe(half_input_of(0), torch::tensor({1, 0})));  // float times bfloat16
    EXPECT_EQ(probe->input, at::kFloat);
  });
}

TEST(MixedPrecision, HalfSumsAreDividedOnBothSides_GD1) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(probe, mesh, {.mixed_precision = {.param_dtype = torch::kHalf}});
    // Two ranks' 40000 overflow half as a sum and not as a mean.
    (probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).sum() * 20000.0).backward();
    const auto bias = sharded_parameters(probe)[1];
    EXPECT_TRUE(testing::equal(bias.local.grad(), torch::full_like(bias.local, 40000.0)));
  });
}

TEST(MixedPrecision, CastsBuffersAtTheFirstForwardAndStateHasTheirOwn_O3_MP6_IG6) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    const auto places = probe->register_buffer("places", torch::tensor({1, 0}));
    fully_shard(
        probe, mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16, .buffer_dtype = torch::kHalf}});
    EXPECT_EQ(probe->table.scalar_type(), at::kFloat);
    probe(half_input_of(0), places);
    EXPECT_EQ(probe->table.scalar_type(), at::kHalf);
    EXPECT_EQ(places.scalar_type(), at::kLong);  // floating point only
    EXPECT_EQ(full_state_dict(probe)["table"].scalar_type(), at::kFloat);
    EXPECT_EQ(probe->table.scalar_type(), at::kHalf);  // and stays
  });
}

TEST(MixedPrecision, GradientsStayLowWhenAskedTo_O4_MP9) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(probe, mesh,
                {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                     .reduce_dtype = torch::kFloat,
                                     .keep_low_precision_grads = true}});
    const auto parameters = sharded_parameters(probe);
    torch::optim::SGD optimizer(local_tensors(parameters), 1.0);
    const auto before = parameters[1].local.detach().clone();
    for (int micro = 0; micro < 2; ++micro)
      probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).sum().backward();
    for (const auto& parameter : parameters) {
      EXPECT_EQ(parameter.local.scalar_type(), at::kFloat);
      EXPECT_EQ(parameter.local.grad().scalar_type(), at::kBFloat16);
    }
    optimizer.step();
    EXPECT_TRUE(
        testing::allclose(before - parameters[1].local.detach(), torch::full_like(before, 4.0f)));
  });
}

// Divided before they are cast, as in PyTorch: one rounding.
TEST(MixedPrecision, GradientsThatStayLowAreRoundedOnce_O4) {
  run_mesh(3, [](Mesh& mesh) {
    nn::Linear linear(nn::LinearOptions(1, 63).bias(false));
    fully_shard(linear, mesh,
                {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                     .reduce_dtype = torch::kFloat,
                                     .keep_low_precision_grads = true}});
    // Exact in bfloat16, and three times as much is not.
    const auto mine = torch::arange(193, 256, torch::kFloat);
    (call_module(linear, torch::ones({1, 1})) * mine.to(mesh.device(), torch::kBFloat16))
        .sum()
        .backward();
    const auto once = mine.narrow(0, 21 * mesh.rank(), 21).to(torch::kBFloat16);
    EXPECT_TRUE(testing::equal(sharded_parameters(linear)[0].local.grad().view({-1}), once));
  });
}

// As torch::optim::AdamW does with the same gradients in the parameters' own type.
TEST(MixedPrecision, AdamWTakesGradientsThatStayLow_O4) {
  const MixedPrecision low{.param_dtype = torch::kBFloat16, .keep_low_precision_grads = true};
  for (const bool whole : {false, true}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto probe = make_probe();
      if (whole) {
        FullyShardedDataParallel<Probe>(probe, mesh,
                                        {.sharding_strategy = ShardingStrategy::no_shard,
                                         .mixed_precision = low,
                                         .use_orig_params = true});
      } else {
        fully_shard(probe, mesh, {.mixed_precision = low});
      }
      const auto parameters = sharded_parameters(probe);
      std::vector<torch::Tensor> expected;
      for (const auto& parameter : parameters)
        expected.push_back(parameter.local.detach().clone().requires_grad_());
      AdamW optimizer(parameters, {.lr = 1e-2, .weight_decay = 0.1});
      torch::optim::AdamW same(expected, torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        probe(half_input_of(mesh.rank() + step), torch::tensor({1, 0})).square().sum().backward();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const auto& gradient = parameters[i].local.grad();
          ASSERT_EQ(gradient.scalar_type(), at::kBFloat16);
          expected[i].mutable_grad() = gradient.to(torch::kFloat);
        }
        optimizer.step();
        same.step();
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          EXPECT_TRUE(testing::allclose(parameters[i].local.detach(), expected[i].detach(), 1e-5))
              << parameters[i].name() << " in step " << step;
          EXPECT_EQ(parameters[i].local.grad().scalar_type(), at::kBFloat16);
        }
      }
    });
  }
}

TEST(Options, UnitsStayGatheredBetweenMicroBatches_F27) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = testing::make_net({});
    ShardOptions options{.reshard_after_forward = false, .reshard_after_backward = false};
    for (auto& block : net->blocks) fully_shard(block, mesh, options);
    fully_shard(net, mesh, options);
    AdamW optimizer(sharded_parameters(net), {.lr = 1e-2});
    const auto tokens = torch::arange(6).view({2, 3});
    for (int micro = 0; micro < 3; ++micro) net(tokens).sum().backward();
    for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathers, 1u) << unit.name;
    optimizer.step();  // what is gathered is old now
    net(tokens).sum().backward();
    for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathers, 2u) << unit.name;
  });
}

// One that writes through data(), past libtorch's versions; the last rank has no rows at all.
TEST(Options, UnitsThatStayGatheredFollowEveryOptimizer_F27) {
  run_mesh(3, [](Mesh& mesh) {
    torch::nn::Linear linear(5, 2);
    {
      const torch::NoGradGuard no_grad;
      linear->weight.fill_(1);
      linear->bias.fill_(2);
    }
    fully_shard(linear, mesh, {.reshard_after_backward = false});
    torch::optim::SGD optimizer(local_tensors(sharded_parameters(linear)),
                                torch::optim::SGDOptions(0.5).momentum(0.9));
    const auto x = torch::ones({1, 5});
    const std::array<float, 3> expected{14, 8, -3.4F};  // all values less 0.5, then 0.95
    for (const float value : expected) {
      const auto out = call_module(linear, x);
      EXPECT_NEAR(out.sum().item<float>(), value, 1e-4);
      optimizer.zero_grad();
      out.sum().backward();
      optimizer.step();
    }
  });
}

TEST(Options, GradientsAreDividedByTheFactorAsked_F32) {
  run_mesh(2, [](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(probe, mesh, {.gradient_divide_factor = 1.0});
    probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).sum().backward();
    const auto bias = sharded_parameters(probe)[1];
    EXPECT_TRUE(testing::equal(bias.local.grad(), torch::full_like(bias.local, 4.0)));
  });
}

// With one rank nothing travels and the shard is handed out as it is.
TEST(MixedPrecision, TravelsInItsDtypes_MP2) {
  std::array<testing::Counts, 2> all;
  run_mesh(2, [&](Mesh& mesh) {
    auto& counts = all[mesh.rank()];
    testing::count(mesh, counts);
    auto probe = make_probe();
    fully_shard(
        probe, mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16, .reduce_dtype = torch::kHalf}});
    probe(half_input_of(mesh.rank()), torch::tensor({1, 0})).square().sum().backward();
    EXPECT_EQ(counts.gathered_in, std::vector{at::kBFloat16});
    EXPECT_EQ(counts.reduced_in, std::vector{at::kHalf});
    // What is asked for whole comes from the shards as they are (MP3).
    const auto before = make_probe();
    EXPECT_TRUE(testing::equal(full_state_dict(probe)["linear.weight"], before->linear->weight));
  });
}

TEST(MixedPrecision, IsOffInEvaluationWhereAskedTo_MP3_L42_L43) {
  const auto places = torch::tensor({1, 0});
  const torch::NoGradGuard no_grad;
  const auto expected = make_probe()(half_input_of(0), places);
  run_mesh(2, [&](Mesh& mesh) {
    auto probe = make_probe();
    fully_shard(probe, mesh,
                {.mixed_precision = {.param_dtype = torch::kBFloat16,
                                     .buffer_dtype = torch::kBFloat16,
                                     .full_precision_in_eval = true}});
    const auto train = [&] {
      probe->train();
      const torch::AutoGradMode with_gradients(true);
      probe(half_input_of(0), places).to(torch::kFloat).sum().backward();
      EXPECT_EQ(probe->weight, at::kBFloat16);
      EXPECT_EQ(probe->table.scalar_type(), at::kBFloat16);
    };
    train();
    probe->eval();
    const torch::NoGradGuard no_grad_here;
    EXPECT_TRUE(testing::equal(probe(half_input_of(0), places), expected));
    EXPECT_EQ(probe->weight, at::kFloat);
    EXPECT_EQ(probe->input, at::kFloat);
    EXPECT_EQ(probe->table.scalar_type(), at::kFloat);
    EXPECT_EQ(unit_reports(probe)[0].gathered_bytes, 0u);
    train();
    probe->eval();
    const torch::AutoGradMode with_gradients(true);
    EXPECT_THAT(testing::error_of([&] { probe(half_input_of(0), places); }),
                ::testing::HasSubstr("full_precision_in_eval is for forwards without gradients"));
    abandon_step(probe);
    train();
  });
}

TEST(MixedPrecision, OfWholeParametersSumsInTheReduceDtype_L56_MP9) {
  for (const auto reduce : {at::kFloat, at::kBFloat16}) {
    for (const bool keep_low : {false, true}) {
      const auto gradients = expected_gradients(reduce);
      run_mesh(2, [&](Mesh& mesh) {
        FullyShardedDataParallel<Probe> model(
            make_probe(), mesh,
            {.sharding_strategy = ShardingStrategy::no_shard,
             .mixed_precision = {.param_dtype = torch::kBFloat16,
                                 .reduce_dtype = reduce,
                                 .keep_low_precision_grads = keep_low},
             .use_orig_params = true});
        model(half_input_of(mesh.rank()), torch::tensor({1, 0})).square().sum().backward();
        const auto parameters = model.parameters();
        ASSERT_EQ(parameters.size(), gradients.size());
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const auto& mine = parameters[i].local.grad();
          EXPECT_EQ(mine.scalar_type(), keep_low ? at::kBFloat16 : at::kFloat);
          const auto expected = gradients[i].view({-1}).to(mine.scalar_type());
          EXPECT_TRUE(testing::equal(mine.view({-1}), expected)) << parameters[i].name();
        }
      });
    }
  }
}

}  // namespace
}  // namespace tessera
