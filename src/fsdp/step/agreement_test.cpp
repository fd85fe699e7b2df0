// What has to be alike on all ranks, or alike in the module and in its shards: where it is not, an
// error says what, and no rank goes on with wrong numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "tessera/error.h"
#include "tessera/optim.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::run_mesh;
using testing::with_values;

template <typename Model>
void backward_of(Model& net, const Mesh& mesh, int number = 0) {
  loss_of(net, batch_of(number, 0, mesh)).backward();
}

torch::Tensor local_of(ModuleRef module, const std::string& name) {
  for (const auto& parameter : sharded_parameters(module)) {
    if (parameter.name() == name) return parameter.local;
  }
  throw std::out_of_range(name);
}

// Which unit --------------------------------------------------------------------------------------

// Gathers match by order, and evaluation does not compare it first.
TEST(ForwardOrder, ThatDiffersInEvaluationIsAnErrorOfTheGathers) {
  for (const int ranks : {2, 3}) {
    run_mesh(ranks, [&](Mesh& mesh) {
      auto net = make_net({.blocks = 2});
      testing::shard(net, mesh);
      const torch::NoGradGuard evaluate;
      if (mesh.rank() == 1) std::swap(net->blocks[0], net->blocks[1]);  // of equal sizes
      const auto text = error_of([&] { loss_of(net, batch(0, 0, 1)); });
      EXPECT_THAT(text, HasSubstr("mismatch"));
      EXPECT_THAT(text, HasSubstr("gather of"));
      EXPECT_THAT(text, HasSubstr("'block0'"));
      EXPECT_THAT(text, HasSubstr("'block1'"));
    });
  }
}

TEST(ForwardOrder, IsComparedOverCopiesToo_EO3) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    auto net = make_net({.blocks = 2});
    for (auto& block : net->blocks) fully_shard(block, hybrid);
    fully_shard(net, hybrid);
    if (mesh.rank() >= 2) std::swap(net->blocks[0], net->blocks[1]);  // a whole copy
    EXPECT_THAT(error_of([&] { backward_of(net, mesh); }),
                HasSubstr("Forward order differs across ranks: rank 0 is all-gathering parameters "
                          "for unit 'block0' while rank 2"));
  });
}

// Parameters of equal sizes: what waits could be added to the other one's.
TEST(UnitControls, SumsThatWaitKnowWhoseTheyAre_F25) {
  run_mesh(4, [](Mesh& mesh) {
    const auto hybrid = mesh.split(2);
    torch::nn::Linear linear(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::Linear second(torch::nn::LinearOptions(4, 4).bias(false));
    torch::nn::Sequential both(linear, second);
    fully_shard(both, hybrid);
    linear->weight.set_requires_grad(false);
    set_requires_all_reduce(both, false);
    const auto backward = [&] { call_module(both, torch::ones({1, 4})).sum().backward(); };
    backward();
    linear->weight.set_requires_grad(true);
    second->weight.set_requires_grad(false);
    set_requires_all_reduce(both, true);
    EXPECT_THAT(error_of(backward), HasSubstr("frozen or thawed between backwards"));
  });
}

// What is frozen ----------------------------------------------------------------------------------

TEST(Frozen, DifferentlyIsAnErrorWhenAUnitIsMade) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    if (mesh.rank() == 1) net->blocks[0]->up->bias.requires_grad_(false);
    const auto text = error_of([&] { fully_shard(net->blocks[0], mesh); });
    EXPECT_THAT(text, HasSubstr("names, shapes, dtypes or in what is frozen"));
    EXPECT_THAT(text, HasSubstr("BlockImpl"));  // 47, 4.6
    EXPECT_THAT(text, HasSubstr("it has 'up.bias Float[13] frozen', rank 0 'up.bias Float[13]'"));
  });
}

TEST(Frozen, DifferentlyIsAnErrorInTheFirstPassThatNamesTheParameter) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    auto& norm = net->blocks[1]->norm;  // two parameters of one size
    (mesh.rank() == 0 ? norm->weight : norm->bias).requires_grad_(false);
    const auto text = error_of([&] { backward_of(net, mesh); });
    EXPECT_THAT(text, HasSubstr("mismatch"));
    EXPECT_THAT(text, HasSubstr("block1.norm.weight"));
    EXPECT_THAT(text, HasSubstr("do not both train"));
    abandon_step(net);
    (mesh.rank() == 0 ? norm->bias : norm->weight).requires_grad_(false);
    EXPECT_EQ(error_of([&] { backward_of(net, mesh); }), "no Error");
  });
}

class FrozenLater : public ::testing::TestWithParam<std::pair<const char*, at::ScalarType>> {};

// Gradients of parameters of one size would be averaged with each other's.
TEST_P(FrozenLater, DifferentlyIsAnErrorOnAllRanks) {
  const std::string kind = GetParam().first;
  const auto reduce_dtype = GetParam().second;
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({.blocks = 1});
    const ShardOptions options{.mixed_precision = {.reduce_dtype = reduce_dtype}};
    std::unique_ptr<FullyShardedDataParallel<testing::Net>> wrapped;
    if (kind == "rows") fully_shard(net, mesh, options);
    if (kind == "replicate") replicate(net, mesh);
    if (kind == "flat_original")
      wrapped = std::make_unique<FullyShardedDataParallel<testing::Net>>(
          net, mesh,
          FullyShardedOptions{.mixed_precision = {.reduce_dtype = reduce_dtype},
                              .use_orig_params = true});
    auto& norm = net->blocks[0]->norm;
    backward_of(net, mesh);
    (mesh.rank() == 0 ? norm->weight : norm->bias).requires_grad_(false);
    const auto text = error_of([&] { backward_of(net, mesh, 1); });
    EXPECT_THAT(text, HasSubstr("mismatch"));
    EXPECT_THAT(text, HasSubstr("require gradients of different parameters"));
  });
}
INSTANTIATE_TEST_SUITE_P(All, FrozenLater,
                         ::testing::Values(std::pair{"rows", at::kFloat},
                                           std::pair{"rows", at::kBFloat16},
                                           std::pair{"flat_original", at::kFloat},
                                           std::pair{"replicate", at::kFloat}),
                         [](const auto& kind) {
                           return std::string(kind.param.first) + c10::toString(kind.param.second);
                         });

TEST(Frozen, ThroughLocalStaysAsItIs) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    AdamW optimizer(sharded_parameters(net), {.lr = 0.1});
    const auto train = [&](int number) {
      optimizer.zero_grad();
      backward_of(net, mesh, number);
      optimizer.step();
    };
    train(0);
    auto local = local_of(net, "block1.up.weight");
    local.requires_grad_(false);
    EXPECT_FALSE(local_of(net, "block1.up.weight").requires_grad());
    EXPECT_FALSE(net->blocks[1]->up->weight.requires_grad());
    const auto before = local.detach().clone();
    const auto other = local_of(net, "block1.down.weight").detach().clone();
    train(1);
    EXPECT_TRUE(testing::equal(local.detach(), before));
    EXPECT_FALSE(local.grad().defined());
    EXPECT_FALSE(testing::equal(local_of(net, "block1.down.weight").detach(), other));
    local.requires_grad_(true);
    train(2);
    EXPECT_TRUE(net->blocks[1]->up->weight.requires_grad());
    EXPECT_FALSE(testing::equal(local.detach(), before));
  });
}

TEST(Frozen, ThroughLocalBetweenForwardAndBackwardGetsNoGradient) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    const auto loss = loss_of(net, batch_of(0, 0, mesh));
    auto local = local_of(net, "block1.up.weight");
    local.requires_grad_(false);
    loss.backward();
    EXPECT_FALSE(local.grad().defined());
    EXPECT_TRUE(local_of(net, "block1.up.bias").grad().defined());
  });
}

// A parameter that was frozen when its unit was made is watched from its thawing on.
TEST(Frozen, AndThawedTrainsLikeAModelThatWasNotSharded) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool whole : {false, true}) {
      auto net = make_net({}), plain = make_net({});
      for (auto* model : {&net, &plain}) (*model)->head->weight.requires_grad_(false);
      if (whole) {
        replicate(net, mesh);
      } else {
        testing::shard(net, mesh);
      }
      backward_of(net, mesh);
      for (auto* model : {&net, &plain}) (*model)->head->weight.requires_grad_(true);
      net->zero_grad();
      backward_of(net, mesh, 1);
      loss_of(plain, batch(1, 0, mesh.size())).backward();
      auto mine = local_of(net, "head.weight").grad();
      const auto& expected = plain->head->weight.grad();
      if (!whole) {
        const auto rows = (expected.size(0) + 1) / 2;
        EXPECT_TRUE(testing::allclose(mine, expected.narrow(0, mesh.rank() * rows, mine.size(0)),
                                      1e-5, 1e-7));
      } else {
        EXPECT_TRUE(testing::allclose(mine, expected, 1e-5, 1e-7));
      }
    }
  });
}

// What was put into the module --------------------------------------------------------------------

TEST(Replaced, ValuesAreInTheNextCheckpoint) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 4);
    fully_shard(linear, mesh);
    linear->weight.set_data(torch::full({4, 3}, 3.f, mesh.device()));
    const auto leaf = model_state(linear).at("weight").as_tensor();
    const auto held = local_of(linear, "weight");
    EXPECT_TRUE(testing::equal(held.detach(), torch::full({2, 3}, 3.f)));
    ASSERT_EQ(leaf.pieces.size(), 1u);
    const auto* data = reinterpret_cast<const float*>(leaf.pieces[0].storage->data);
    EXPECT_EQ(data[leaf.pieces[0].storage_offset], 3.f);
  });
}

TEST(Replaced, ValuesAreWhatTheOptimizerUpdates) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = with_values(nn::Linear(3, 4), 3), plain = with_values(nn::Linear(3, 4), 3);
    fully_shard(net, mesh);
    AdamW mine(sharded_parameters(net), {.lr = 0.1});
    AdamW expected(sharded_parameters(plain), {.lr = 0.1});
    call_module(net, torch::ones({1, 3})).sum().backward();
    plain->forward(torch::ones({1, 3})).sum().backward();
    const auto values = torch::full({4, 3}, 3.f);
    net->weight.set_data(values.to(mesh.device(), torch::kFloat, false, /*copy=*/true));
    plain->weight.set_data(values.clone());
    mine.step();
    expected.step();
    EXPECT_TRUE(testing::allclose(full_state_dict(net)["weight"], plain->weight.detach()));
    EXPECT_TRUE(testing::allclose(full_state_dict(net)["bias"], plain->bias.detach()));
  });
}

TEST(Replaced, ByAnotherShapeIsAnErrorThatNamesTheParameter) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    net->blocks[1]->up->weight.set_data(torch::ones({2, 2}, mesh.device()));
    EXPECT_THAT(error_of([&] { static_cast<void>(model_state(net)); }), HasSubstr("up.weight"));
    EXPECT_THAT(error_of([&] { backward_of(net, mesh); }), HasSubstr("block1.up.weight"));
  });
}

// Parts are not wholes ----------------------------------------------------------------------------

TEST(Parts, OptimizersThatAreNotElementwiseAreRefused) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool flat : {false, true}) {
      auto net = make_net({});
      std::unique_ptr<FullyShardedDataParallel<testing::Net>> wrapped;
      if (flat) {
        wrapped = std::make_unique<FullyShardedDataParallel<testing::Net>>(net, mesh);
      } else {
        testing::shard(net, mesh);
      }
      torch::optim::LBFGS optimizer(local_tensors(sharded_parameters(net)));
      const auto closure = [&] {
        optimizer.zero_grad();
        auto loss = loss_of(net, batch_of(0, 0, mesh));
        loss.backward();
        return loss;
      };
      EXPECT_THAT(error_of([&] { optimizer.step(closure); }), HasSubstr("torch::optim::LBFGS"));
    }
  });
}

// It is right if every rank has whole parameters.
TEST(Parts, OptimizersThatAreNotElementwiseWorkOnWholeParameters) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({}), plain = make_net({});
    replicate(net, mesh);
    const auto train = [](auto& model, const torch::Tensor& tokens) {
      torch::optim::LBFGS optimizer(local_tensors(sharded_parameters(model)),
                                    torch::optim::LBFGSOptions(0.1).max_iter(3));
      optimizer.step([&] {
        optimizer.zero_grad();
        auto loss = loss_of(model, tokens);
        loss.backward();
        return loss;
      });
    };
    train(net, batch_of(0, 0, mesh));
    train(plain, batch(0, 0, mesh.size()));
    EXPECT_TRUE(testing::allclose(net->head->weight, plain->head->weight, 1e-4, 1e-6));
  });
}

TEST(Parts, NormsOfTorchAreRefused) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    backward_of(net, mesh);
    const auto parameters = sharded_parameters(net);
    for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      EXPECT_THAT(error_of([&] {
                    torch::nn::utils::clip_grad_norm_(local_tensors(parameters), 1.0, type);
                  }),
                  HasSubstr("tessera::clip_grad_norm"));
    }
    EXPECT_GT(clip_grad_norm(parameters, 1e-3), 1e-3);
    // What the part alone is asked for, and what is right on parts.
    const auto& gradient = parameters.front().local.grad();
    EXPECT_GT(gradient.clone().norm().item<double>(), 0);
    EXPECT_GT(gradient.abs().sum().item<double>(), 0);
    EXPECT_TRUE(testing::equal(gradient, gradient.clone()));
  });
}

TEST(Parts, AutogradsGradOfParametersIsRefused) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool whole : {false, true}) {
      auto net = make_net({});
      if (whole) {
        replicate(net, mesh);
      } else {
        testing::shard(net, mesh);
      }
      const auto loss = loss_of(net, batch_of(0, 0, mesh));
      const auto& weight = net->blocks[1]->up->weight;
      const auto text = error_of([&] { torch::autograd::grad({loss}, {weight}); });
      EXPECT_THAT(text, HasSubstr("unsupported"));
      EXPECT_THAT(text, HasSubstr("block1.up.weight"));
      abandon_step(net);
      EXPECT_EQ(error_of([&] { backward_of(net, mesh); }), "no Error");
    }
    // The gradient of an input is this rank's own, as it should be.
    auto linear = with_values(nn::Linear(3, 4), 3);
    fully_shard(linear, mesh);
    const auto x = torch::ones({1, 3}).requires_grad_();
    const auto gradient = torch::autograd::grad({call_module(linear, x).sum()}, {x});
    EXPECT_EQ(gradient.front().sizes(), x.sizes());
  });
}

// What no unit has --------------------------------------------------------------------------------

TEST(Forgotten, ParametersAreNamedOnce) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(2, [](Mesh& mesh) {
      auto net = make_net({});
      for (auto& block : net->blocks) fully_shard(block, mesh);  // and not the model
      AdamW optimizer(sharded_parameters(net));
      static_cast<void>(model_state(net));
      // What was meant to stay out is not forgotten, nor what is frozen.
      auto other = make_net({});
      other->embed->weight.requires_grad_(false);
      for (auto& block : other->blocks)
        fully_shard(block, mesh, {.ignored_parameters = {other->head->weight}});
      AdamW second(sharded_parameters(other));
    });
  });
  ASSERT_EQ(warnings.size(), 2u);  // on two ranks
  EXPECT_THAT(warnings.front(), HasSubstr("parameter 'embed.weight' and 1 more are in no unit"));
}

}  // namespace
}  // namespace tessera
