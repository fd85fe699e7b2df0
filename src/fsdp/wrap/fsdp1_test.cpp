// FullyShardedDataParallel: FSDP1's geometry, strategies and wrap policies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "base/testing.h"
#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "layout/plan.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::Block;
using testing::BlockImpl;
using ::testing::ElementsAre;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kSteps;
using testing::kWidth;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::reference;
using testing::run_mesh;

FullyShardedDataParallel<Net> wrap(Net net, const Mesh& mesh, FullyShardedOptions options) {
  options.auto_wrap_policy = module_wrap_policy<BlockImpl>();
  const bool hybrid = options.sharding_strategy == ShardingStrategy::hybrid_shard ||
                      options.sharding_strategy == ShardingStrategy::hybrid_shard_zero2;
  if (!hybrid) return {std::move(net), mesh, options};
  return {std::move(net), mesh.split(mesh.size() % 2 == 0 ? 2 : 1), options};
}

// What this rank holds of each parameter of the module: name, first element, elements.
struct Held {
  std::string name;
  std::int64_t begin = 0;
  torch::Tensor elements;
};
std::vector<Held> held_by(const ShardedParameter& parameter) {
  const auto local = parameter.local.detach();
  if (!parameter.sharded || (parameter.members.empty() && parameter.flat))
    return {{parameter.name(), parameter.sharded ? parameter.offset : 0, local.view({-1})}};
  std::vector<Held> all;
  for (const auto& member : parameter.members) {
    all.push_back(
        {member.name, member.range.begin, local.narrow(0, member.base, numel(member.range))});
  }
  return all;
}

using Fsdp1Case = std::tuple<int, ShardingStrategy, bool, bool, bool>;
class Fsdp1 : public ::testing::TestWithParam<Fsdp1Case> {};

TEST_P(Fsdp1, EqualsSingleProcessOnAllRanksData_T1) {
  const auto [world, strategy, use_orig_params, no_sync, offload] = GetParam();
  const int micros = no_sync ? 3 : 1;
  const bool tied = use_orig_params;
  const auto expected = reference(world, micros, tied);
  run_mesh(world, [&](Mesh& mesh) {
    auto net = wrap(make_net({.tied = tied}), mesh,
                    {.sharding_strategy = strategy,
                     .cpu_offload = {.offload_params = offload},
                     .use_orig_params = use_orig_params});
    const auto parameters = net.parameters();
    if (offload) {
      for (const auto& parameter : parameters) EXPECT_TRUE(parameter.sharded) << parameter.name();
    }
    torch::optim::SGD optimizer(local_tensors(parameters), testing::sgd_options());
    for (int step = 0; step < kSteps; ++step) {
      optimizer.zero_grad();
      double sum = 0;
      for (int micro = 0; micro < micros; ++micro) {
        const auto rows = batch_of(step, micro, mesh);
        std::optional<NoSync> quiet;
        // Offloaded gradients accumulate without no_sync too, which PyTorch's do not (CO9).
        const bool synchronises = offload && world % 2 != 0;
        if (micro + 1 < micros && !synchronises) quiet.emplace(net.module());
        auto loss = loss_of(net, rows);
        loss.backward();
        sum += loss.item<double>();
      }
      ASSERT_NEAR(mesh.all_reduce_sum(sum) / world, expected.losses[step],
                  2e-6 * expected.losses[step]);
      ASSERT_NEAR(net.clip_grad_norm_(1.0), expected.norms[step], 2e-6);
      optimizer.step();
    }
    for (const auto& parameter : parameters) {
      for (const auto& held : held_by(parameter)) {
        const auto mine = expected.parameters.at(held.name).view({-1}).narrow(
            0, held.begin, held.elements.numel());
        EXPECT_TRUE(testing::allclose(held.elements, mine, 1e-5, 1e-6)) << held.name;
      }
    }
  });
}

const auto kStrategies = ::testing::Values(
    ShardingStrategy::full_shard, ShardingStrategy::shard_grad_op, ShardingStrategy::no_shard,
    ShardingStrategy::hybrid_shard, ShardingStrategy::hybrid_shard_zero2);
INSTANTIATE_TEST_SUITE_P(All, Fsdp1,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), kStrategies,
                                            ::testing::Bool(), ::testing::Bool(),
                                            ::testing::Values(false)));
INSTANTIATE_TEST_SUITE_P(Offload, Fsdp1,
                         ::testing::Combine(::testing::Values(2, 3), kStrategies, ::testing::Bool(),
                                            ::testing::Bool(), ::testing::Values(true)));

TEST(Fsdp1Geometry, FlatParametersHoldTheUnitsEndToEnd_T2_FH2) {
  run_mesh(3, [](Mesh& mesh) {
    auto plain = make_net({.blocks = 1});
    auto net = wrap(make_net({.blocks = 1}), mesh, {});
    const auto parameters = net.parameters();
    ASSERT_EQ(parameters.size(), 2u);
    EXPECT_EQ(parameters[0].name(), "_flat_param");
    EXPECT_EQ(parameters[1].name(), "block0._flat_param");
    std::vector<std::string> names;
    for (const auto& member : parameters[1].members) names.push_back(member.name);
    EXPECT_THAT(names, ElementsAre("block0.norm.weight", "block0.norm.bias", "block0.up.weight",
                                   "block0.up.bias", "block0.down.weight", "block0.down.bias"));
    std::vector<torch::Tensor> flat;
    for (const auto& parameter : plain->blocks[0]->parameters())
      flat.push_back(parameter.detach().view({-1}));
    auto whole = torch::cat(flat);
    const auto chunk = (whole.numel() + 2) / 3;
    whole = torch::constant_pad_nd(whole, {0, 3 * chunk - whole.numel()});
    EXPECT_TRUE(
        testing::equal(parameters[1].local.detach(), whole.narrow(0, chunk * mesh.rank(), chunk)));
  });
}

TEST(Fsdp1Geometry, OriginalParametersAreAlignedWith42_UO4_K8) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 1);  // 3 elements, one of padding, 1, and one more for two ranks: 6
    auto model = FullyShardedDataParallel<nn::Linear>(linear, mesh, {.use_orig_params = true});
    const auto parameters = model.parameters();
    EXPECT_THAT(parameters[0].shape, ElementsAre(1, 3));
    EXPECT_EQ(parameters[0].local.numel(), mesh.rank() == 0 ? 3 : 0);
    EXPECT_EQ(parameters[1].local.numel(), mesh.rank() == 0 ? 0 : 1);
    const auto& any = parameters[mesh.rank()].local;
    const auto shard = any.detach().as_strided({3}, {1}, 0);
    if (mesh.rank() == 1) {
      EXPECT_EQ(shard[0].item<float>(), 42);
      EXPECT_EQ(shard[2].item<float>(), 42);
    }
  });
}

// 16 bytes are 8 elements of what is gathered: weight, 5 of padding, bias, one more for two ranks.
TEST(Fsdp1Geometry, AlignmentCountsElementsOfTheParamDtype_K9) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = FullyShardedDataParallel<nn::Linear>(
        nn::Linear(3, 1), mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16}, .use_orig_params = true});
    const auto parameters = model.parameters();
    EXPECT_EQ(parameters[0].local.numel(), mesh.rank() == 0 ? 3 : 0);
    EXPECT_EQ(parameters[1].local.numel(), mesh.rank() == 0 ? 0 : 1);
    const auto shard = parameters[mesh.rank()].local.detach().as_strided({5}, {1}, 0);
    for (const int i : mesh.rank() == 0 ? std::vector{3, 4} : std::vector{0, 1, 2, 4})
      EXPECT_EQ(shard[i].item<float>(), 42) << i;
  });
}

TEST(Fsdp1Geometry, NamesInAFlatParameterAreThoseBelowTheModuleAsked_NM3) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = wrap(make_net({}), mesh, {});
    const auto parameters = sharded_parameters(net->blocks[1]);
    ASSERT_EQ(parameters.size(), 1u);
    EXPECT_EQ(parameters[0].name(), "_flat_param");
    std::vector<std::string> names;
    for (const auto& member : parameters[0].members) names.push_back(member.name);
    EXPECT_THAT(names, ElementsAre("norm.weight", "norm.bias", "up.weight", "up.bias",
                                   "down.weight", "down.bias"));
  });
}

TEST(Fsdp1Geometry, RefusesWhatCannotBeFlattened_FH1_X23) {
  run_mesh(2, [](Mesh& mesh) {
    const auto with = [&](const torch::Tensor& parameter) {
      nn::Linear linear(2, 2);
      linear->register_parameter("more", parameter, /*requires_grad=*/false);
      linear->weight.requires_grad_(false);
      linear->bias.requires_grad_(false);
      return error_of([&] { FullyShardedDataParallel<nn::Linear>(linear, mesh); });
    };
    EXPECT_THAT(with(torch::ones({2}, torch::kHalf)),
                HasSubstr("Must flatten tensors with uniform dtype but got Float and Half"));
    EXPECT_EQ(with(torch::ones({2})), "no Error");
    nn::Module integers;
    auto module = std::make_shared<nn::Module>(integers);
    module->register_parameter("index", torch::arange(4), /*requires_grad=*/false);
    EXPECT_THAT(error_of([&] {
                  detail::wrap_module(module, {mesh, mesh, mesh}, false, {}, nullptr);
                }),
                HasSubstr("Cannot flatten integer dtype tensors"));
  });
}

// As in 1.13 they lie in the flat array in row-major order.
TEST(Fsdp1Geometry, ParametersThatAreNotContiguousKeepTheirValues_FH1_FH2_P1) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool flat : {true, false}) {
      nn::Linear linear(3, 5);
      const auto values = torch::arange(15, torch::kFloat).view({3, 5}).t();
      linear->weight.set_data(values);
      ASSERT_FALSE(linear->weight.is_contiguous());
      if (flat) {
        FullyShardedDataParallel<nn::Linear>(linear, mesh);
      } else {
        fully_shard(linear, mesh);
      }
      EXPECT_TRUE(testing::equal(full_state_dict(linear)["weight"], values));
      const auto expected = torch::linear(torch::ones({1, 3}), values);
      const torch::NoGradGuard no_grad;
      EXPECT_TRUE(testing::allclose(
          call_module(linear, torch::ones({1, 3})) - full_state_dict(linear)["bias"], expected));
    }
  });
}

TEST(Fsdp1State, HasOriginalNamesAndBoxes) {
  for (const bool use_orig_params : {false, true}) {
    run_mesh(3, [&](Mesh& mesh) {
      auto plain = make_net({.blocks = 1});
      auto net = wrap(make_net({.blocks = 1}), mesh, {.use_orig_params = use_orig_params});
      const auto state = model_state(*net.module());
      for (const auto& whole : sharded_parameters(plain)) {
        const auto flat = whole.local.detach().view({-1});
        const auto& leaf = state.at(whole.name()).as_tensor();
        EXPECT_EQ(leaf.shape, whole.shape) << whole.name();
        EXPECT_TRUE(leaf.sharded);
        std::int64_t count = 0;
        for (const auto& piece : leaf.pieces) {
          const RunSequence runs(piece.slice, leaf.shape);
          const auto* elements =
              reinterpret_cast<const float*>(piece.storage->data) + piece.storage_offset;
          for (std::int64_t r = 0; r < runs.size(); ++r) {
            for (std::int64_t i = 0; i < runs[r].count; ++i) {
              EXPECT_EQ(elements[runs[r].local + i], flat[runs[r].global + i].item<float>());
            }
            count += runs[r].count;
          }
        }
        EXPECT_EQ(mesh.all_reduce_sum(static_cast<double>(count)), flat.numel()) << whole.name();
      }
    });
  }
}

struct StackImpl : nn::Module {
  nn::Sequential body;
  nn::Linear head{nullptr};
  StackImpl() {
    body = register_module("body", nn::Sequential(nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 4)));
    head = register_module("head", nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return call_module(head, body->forward(x)); }
};
TESSERA_MODULE(Stack);

std::vector<std::string> units_of(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& unit : unit_reports(module)) names.push_back(unit.name);
  return names;
}

TEST(WrapPolicies, ChooseByTypeSizeAndFunction_WP3_WP4_WP5) {
  run_mesh(2, [](Mesh& mesh) {
    {
      FullyShardedDataParallel<Stack> model(
          Stack(), mesh, {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>()});
      EXPECT_THAT(units_of(*model.module()), ElementsAre("", "body.0", "body.2", "head"));
      model(torch::ones({1, 4})).sum().backward();  // slots of the Sequential are seen
      for (const auto& unit : unit_reports(model.module()))
        EXPECT_EQ(unit.reductions, unit.parameters > 0 ? 1u : 0u) << unit.name;
    }
    {
      FullyShardedDataParallel<Stack> model(Stack(), mesh,
                                            {.auto_wrap_policy = size_based_auto_wrap_policy(70)});
      EXPECT_THAT(units_of(*model.module()), ElementsAre("", "body"));
    }
    const auto is_head = [](const nn::Module& module) {
      const auto* linear = dynamic_cast<const nn::LinearImpl*>(&module);
      return linear != nullptr && linear->options.out_features() == 2;
    };
    const auto either =
        or_policy({lambda_auto_wrap_policy(is_head), module_wrap_policy<nn::TanhImpl>()});
    FullyShardedDataParallel<Stack> model(Stack(), mesh, {.auto_wrap_policy = either});
    EXPECT_THAT(units_of(*model.module()), ElementsAre("", "body.1", "head"));
  });
}

TEST(WrapPolicies, AlwaysWrapsAllThatHasAForward_WP2) {
  run_mesh(2, [](Mesh& mesh) {
    const FullyShardedDataParallel<Stack> model(Stack(), mesh,
                                                {.auto_wrap_policy = always_wrap_policy()});
    EXPECT_THAT(units_of(*model.module()),
                ElementsAre("", "body", "body.0", "body.1", "body.2", "head"));
  });
}

// Two layers that share a weight of 64 elements.
struct TiedImpl : nn::Module {
  testing::Head first{nullptr}, second{nullptr};
  TiedImpl() {
    first = register_module("first", testing::Head(torch::ones({8, 8})));
    second = register_module("second", testing::Head(first->weight));
  }
  torch::Tensor forward(const torch::Tensor& x) { return second(first(x)); }
};
TESSERA_MODULE(Tied);

struct NestImpl : nn::Module {
  Tied tied{nullptr};
  nn::Linear last{nullptr};
  NestImpl() {
    tied = register_module("tied", Tied());
    last = register_module("last", nn::Linear(8, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return call_module(last, tied(x)); }
};
TESSERA_MODULE(Nest);

TEST(WrapPolicies, AreAskedFromTheOutsideInAndThenAboutTheRest_WP1) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<std::string> asked;
    WrapPolicy policy;
    policy.decide = [&](const nn::Module& module, bool recurse, std::int64_t unwrapped) {
      const bool is_linear = dynamic_cast<const nn::LinearImpl*>(&module) != nullptr;
      const auto* kind = is_linear                                           ? "linear"
                         : dynamic_cast<const TiedImpl*>(&module) != nullptr ? "tied"
                         : dynamic_cast<const NestImpl*>(&module) != nullptr ? "nest"
                                                                             : "head";
      asked.push_back(kind + std::string(recurse ? " in " : " rest ") + std::to_string(unwrapped));
      return recurse || is_linear;
    };
    nn::Sequential around;
    around->push_back(Nest());
    const FullyShardedDataParallel<nn::Sequential> model(around, mesh,
                                                         {.auto_wrap_policy = policy});
    // 64 shared elements of two heads, 18 of the linear layer, which becomes a unit.
    EXPECT_THAT(asked, ElementsAre("nest in 82", "tied in 64", "head in 64", "head rest 64",
                                   "head in 64", "head rest 64", "tied rest 64", "linear in 18",
                                   "linear rest 18", "nest rest 64"));
    EXPECT_THAT(units_of(*around), ElementsAre("", "0.last"));
  });
}

TEST(WrapPolicies, CountSharedParametersOnceAndKnowLeaves_WP1_WP3) {
  run_mesh(2, [](Mesh& mesh) {
    const auto units = [&](const WrapPolicy& policy) {
      const FullyShardedDataParallel<Nest> model(Nest(), mesh, {.auto_wrap_policy = policy});
      return units_of(*model.module());
    };
    const auto is_head = [](const nn::Module& module) {
      return dynamic_cast<const testing::HeadImpl*>(&module) != nullptr;
    };
    const auto is_tied = [](const nn::Module& module) {
      return dynamic_cast<const TiedImpl*>(&module) != nullptr;
    };
    // 64 shared elements are not 128.
    EXPECT_THAT(units(size_based_auto_wrap_policy(65)), ElementsAre(""));
    EXPECT_THAT(units(size_based_auto_wrap_policy(64, {}, is_head)), ElementsAre("", "tied"));
    EXPECT_THAT(units(size_based_auto_wrap_policy(64, is_tied)), ElementsAre(""));
  });
}

TEST(WrapPolicies, AFunctionMayGiveOptions_WP5_C5) {
  run_mesh(2, [](Mesh& mesh) {
    const auto heads_stay = [](const nn::Module& module, FullyShardedOptions& options) {
      const auto* linear = dynamic_cast<const nn::LinearImpl*>(&module);
      if (linear == nullptr) return false;
      if (linear->options.out_features() == 2)
        options.sharding_strategy = ShardingStrategy::shard_grad_op;
      return true;
    };
    const auto policy =
        or_policy({custom_policy(heads_stay), module_wrap_policy<nn::LinearImpl>()});
    FullyShardedDataParallel<Stack> model(Stack(), mesh, {.auto_wrap_policy = policy});
    EXPECT_THAT(units_of(*model.module()), ElementsAre("", "body.0", "body.2", "head"));
    model(torch::ones({1, 4})).sum().backward();
    for (const auto& unit : unit_reports(model.module())) {
      if (unit.name.empty()) continue;
      EXPECT_EQ(unit.gathers, unit.name == "head" ? 1u : 2u) << unit.name;
    }
  });
}

TEST(WrapPolicies, FrozenParametersBesideOthersAreRefusedOrWarnedOf_WP8) {
  for (const bool original : {false, true}) {
    const auto warnings = testing_support::warnings_of([&] {
      run_mesh(2, [&](Mesh& mesh) {
        Stack stack;
        stack->head->bias.requires_grad_(false);
        const auto text = error_of([&] {
          FullyShardedDataParallel<Stack>(stack, mesh,
                                          {.auto_wrap_policy = module_wrap_policy<nn::LinearImpl>(),
                                           .use_orig_params = original});
        });
        if (original) {
          EXPECT_EQ(text, "no Error");
        } else {
          EXPECT_THAT(text,
                      HasSubstr("head has both parameters with requires_grad=True and False"));
          EXPECT_THAT(text, HasSubstr("requires_grad=False: head.bias"));
        }
      });
    });
    ASSERT_EQ(warnings.size(), original ? 2u : 0u);
    if (original) {
      EXPECT_THAT(warnings[0], HasSubstr("10 numel instead of 8 numel"));
    }
  }
}

TEST(Fsdp1Options, IgnoredParametersStayAsTheyAre_IG3) {
  run_mesh(2, [](Mesh& mesh) {
    Stack stack;
    testing::move_to(mesh.device(), *stack);
    FullyShardedOptions options;
    options.ignored_modules = {stack->head.ptr()};
    options.ignored_parameters = {stack->body->ptr<nn::LinearImpl>(0)->bias};
    FullyShardedDataParallel<Stack> model(stack, mesh, options);
    const auto parameters = model.parameters();
    ASSERT_EQ(parameters.size(), 4u);  // the flat one, a bias, weight and bias of the head
    EXPECT_EQ(parameters[0].members.size(), 3u);
    EXPECT_FALSE(parameters[1].sharded);
    model(torch::full({1, 4}, mesh.rank() + 1.0f)).sum().backward();
    // Not reduced: each rank has its own.
    const auto own = stack->head->weight.grad().abs().sum().item<double>();
    EXPECT_NE(2 * own, mesh.all_reduce_sum(own));
  });
}

TEST(Fsdp1Options, RefusesWhatPytorchRefuses) {
  run_mesh(2, [](Mesh& mesh) {
    using Wrapped = FullyShardedDataParallel<Stack>;
    EXPECT_THAT(error_of([&] {
                  Wrapped(Stack(), mesh, {.sharding_strategy = ShardingStrategy::hybrid_shard});
                }),
                HasSubstr("requires explicit specification of process group or device_mesh"));
    EXPECT_THAT(error_of([&] {
                  Stack stack;
                  stack->head->bias.set_requires_grad(false);
                  Wrapped(stack, mesh);
                }),
                HasSubstr("Must flatten tensors with uniform `requires_grad`"));
    EXPECT_THAT(error_of([&] {
                  Stack stack;
                  fully_shard(stack->head, mesh);
                  Wrapped(stack, mesh, {.auto_wrap_policy = always_wrap_policy()});
                }),
                HasSubstr("not already have FSDP applied"));
    EXPECT_THAT(error_of([&] {
                  Stack stack;
                  fully_shard(stack->head, mesh);
                  Wrapped(stack, mesh, {.ignored_modules = {stack->head.ptr()}});
                }),
                HasSubstr("should not include FSDP modules"));
  });
}

TEST(Fsdp1Options, PrefetchModesGiveTheSameNumbers_E3) {
  run_mesh(2, [](Mesh& mesh) {
    std::vector<double> losses;
    for (const auto& mode :
         {std::optional<BackwardPrefetch>(), std::optional(BackwardPrefetch::pre),
          std::optional(BackwardPrefetch::post)}) {
      auto net = wrap(make_net({}), mesh,
                      {.backward_prefetch = mode, .forward_prefetch = mode.has_value()});
      AdamW optimizer(net.parameters(), {.lr = 1e-2});
      double loss = 0;
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        auto now = loss_of(net, batch(step, 0, 1));
        now.backward();
        optimizer.step();
        loss = now.item<double>();
      }
      losses.push_back(loss);
      for (const auto& unit : unit_reports(net.module())) EXPECT_EQ(unit.gathered_bytes, 0u);
    }
    EXPECT_EQ(losses[0], losses[1]);
    EXPECT_EQ(losses[0], losses[2]);
  });
}

TEST(Fsdp1Options, NoSyncKeepsWhatShardGradOpGathered_NS2_NS3) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = wrap(make_net({}), mesh, {.sharding_strategy = ShardingStrategy::shard_grad_op});
    {
      const auto quiet = net.no_sync();
      for (int micro = 0; micro < 2; ++micro) loss_of(net, batch(0, micro, 1)).backward();
      for (const auto& unit : unit_reports(net.module())) {
        EXPECT_GT(unit.gathered_bytes, 0u) << unit.name;
        EXPECT_EQ(unit.reductions, 0u) << unit.name;
      }
    }
    loss_of(net, batch(0, 2, 1)).backward();
    for (const auto& unit : unit_reports(net.module())) {
      EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
      EXPECT_EQ(unit.gathers, 1u) << unit.name;
      EXPECT_EQ(unit.reductions, 1u) << unit.name;
    }
  });
}

TEST(Fsdp1Options, CastsRootInputsAndKeepsShardsWhole_O6) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Stack> model(
        Stack(), mesh,
        {.mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = false}});
    const auto y = model(torch::ones({1, 4}));
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(model.parameters()[0].local.scalar_type(), at::kFloat);
    EXPECT_EQ(model.parameters()[0].local.grad().scalar_type(), at::kFloat);
  });
}

}  // namespace
}  // namespace tessera
