// FullyShardedDataParallel's methods, and what it refuses (spec 6.2, CH, NS, CG1).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string>
#include <utility>

#include "base/testing.h"
#include "fsdp/testing/test_training.h"
#include "fsdp/unit/grad_reducer.h"
#include "tessera/error.h"
#include "tessera/optimizer_in_backward.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/wrap_scope.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::Block;
using testing::BlockImpl;
using testing::error_of;
using ::testing::HasSubstr;
using testing::kWidth;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

FullyShardedDataParallel<Net> wrap(const Mesh& mesh, FullyShardedOptions options = {}) {
  options.auto_wrap_policy = module_wrap_policy<BlockImpl>();
  return {make_net({}), mesh, options};
}

// A block that was wrapped by itself inside of a module.
struct OuterImpl : nn::Module {
  FullyShardedDataParallel<Block> inner;
  OuterImpl(const Mesh& mesh, const FullyShardedOptions& options) : inner(Block(), mesh, options) {
    register_module("inner", inner.module());
  }
  torch::Tensor forward(const torch::Tensor& x) { return inner(x); }
};
TESSERA_MODULE(Outer);

// Communication hooks -----------------------------------------------------------------------------

std::vector<torch::Tensor> gradients_of(const FullyShardedDataParallel<Net>& model) {
  std::vector<torch::Tensor> gradients;
  for (const auto& parameter : model.parameters()) gradients.push_back(parameter.local.grad());
  return gradients;
}

TEST(CommHooks, BuiltInOnesAverage_CH3) {
  for (const auto strategy : {ShardingStrategy::full_shard, ShardingStrategy::no_shard}) {
    for (const bool original : {false, true}) {
      run_mesh(2, [&](Mesh& mesh) {
        const FullyShardedOptions options{.sharding_strategy = strategy,
                                          .use_orig_params = original};
        auto plain = wrap(mesh, options);
        loss_of(plain, batch_of(0, 0, mesh)).backward();
        const auto expected = gradients_of(plain);
        const std::vector<std::pair<CommHook, double>> hooks{{average_hook(mesh), 1e-6},
                                                             {fp16_compress_hook(mesh), 2e-3},
                                                             {bf16_compress_hook(mesh), 2e-2}};
        for (const auto& [hook, tolerance] : hooks) {
          auto model = wrap(mesh, options);
          model.register_comm_hook(hook);
          loss_of(model, batch_of(0, 0, mesh)).backward();
          const auto mine = gradients_of(model);
          for (std::size_t i = 0; i < mine.size(); ++i) {
            ASSERT_EQ(mine[i].defined(), expected[i].defined());
            if (!mine[i].defined()) continue;  // this rank holds nothing of it
            ASSERT_EQ(mine[i].scalar_type(), torch::kFloat);
            EXPECT_TRUE(testing::allclose(mine[i], expected[i], tolerance, tolerance / 10));
            const bool is_cast = tolerance > 1e-4 && mine[i].numel() > 20;  // and it shows
            EXPECT_FALSE(is_cast && testing::equal(mine[i], expected[i]));
          }
        }
      });
    }
  }
}

TEST(CommHooks, ReplaceDivisionAndGetWhatTravels_CH2_CH4) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool sharded : {true, false}) {
      FullyShardedDataParallel<nn::Linear> model(
          nn::Linear(4, 3), mesh,
          {.sharding_strategy =
               sharded ? ShardingStrategy::full_shard : ShardingStrategy::no_shard});
      int calls = 0;
      model.register_comm_hook([&](torch::Tensor& gradient, torch::Tensor& shard) {
        ++calls;
        EXPECT_EQ(gradient.numel(), sharded ? 16 : 15);  // 15 elements, padded for two ranks
        EXPECT_EQ(shard.defined(), sharded);
        if (sharded) {
          shard.fill_(7);
        } else {
          gradient.fill_(7);
        }
      });
      model(torch::ones({1, 4})).sum().backward();
      EXPECT_EQ(calls, 1);
      for (const auto& parameter : model.parameters())
        EXPECT_TRUE(testing::equal(parameter.local.grad(), torch::full_like(parameter.local, 7)));
    }
  });
}

TEST(CommHooks, AreRefusedWhereTheyWouldBeWrong_CH1_HY7_X61_X62) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    EXPECT_THAT(error_of([&] { model.register_comm_hook({}); }), HasSubstr("callable"));
    model.register_comm_hook(average_hook(mesh));
    EXPECT_THAT(error_of([&] { model.register_comm_hook(average_hook(mesh)); }),
                HasSubstr("already registered"));
    FullyShardedDataParallel<Outer> outer(Outer(mesh, FullyShardedOptions{}), mesh);
    outer(torch::ones({1, kWidth}));
    EXPECT_THAT(error_of([&] { outer->inner.register_comm_hook(average_hook(mesh)); }),
                HasSubstr("can only be called on a root instance"));
  });
  run_mesh(4, [](Mesh& mesh) {
    FullyShardedDataParallel<Net> hybrid(make_net({}), mesh.split(2),
                                         {.sharding_strategy = ShardingStrategy::hybrid_shard});
    EXPECT_THAT(error_of([&] { hybrid.register_comm_hook(average_hook(mesh)); }),
                HasSubstr("hybrid"));
  });
}

// Roots -------------------------------------------------------------------------------------------

TEST(Fsdp1Methods, OfRootsAreRefusedOnInnerUnits_M4_NS1_CG1_X45_X46) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Outer> outer(Outer(mesh, FullyShardedOptions{}), mesh);
    EXPECT_TRUE(outer.is_root());
    EXPECT_FALSE(outer->inner.is_root());
    EXPECT_THAT(error_of([&] { static_cast<void>(outer->inner.no_sync()); }),
                HasSubstr("`no_sync()` on inner FSDP instances is not supported"));
    EXPECT_THAT(error_of([&] { outer->inner.clip_grad_norm_(1); }),
                HasSubstr("should only be called on the root (parent) instance"));
  });
}

// The root takes the child over; PyTorch refuses the model for good.
TEST(Fsdp1Methods, AChildThatRanFirstJoinsItsRoot_X26_L36_R2) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Outer> outer(Outer(mesh, FullyShardedOptions{}), mesh);
    outer->inner(torch::ones({1, kWidth}));
    EXPECT_TRUE(outer->inner.is_root());
    outer(torch::ones({1, kWidth})).sum().backward();
    EXPECT_FALSE(outer->inner.is_root());
    for (const auto& parameter : outer.parameters())
      EXPECT_TRUE(parameter.local.grad().defined()) << parameter.name();
  });
}

TEST(Fsdp1Methods, UnitsOfOneModelUseOriginalParametersAlike_X28_C14) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Outer> outer(Outer(mesh, FullyShardedOptions{.use_orig_params = true}),
                                          mesh);
    // The outer unit has no parameters, and an option nevertheless.
    EXPECT_THAT(error_of([&] {
                  outer(torch::ones({1, kWidth}));
                }),
                HasSubstr("Expects one homogeneous value for use_orig_params"));
  });
}

TEST(Fsdp1Methods, NoSyncPutsFlagsBack_M15_NS2_NS6) {
  run_mesh(2, [&](Mesh& mesh) {
    auto model = wrap(mesh);
    auto expected = wrap(mesh);
    // Synchronised, then not, then synchronised again: shards from the first survive.
    for (int micro = 0; micro < 3; ++micro) {
      const auto backward = [&] { loss_of(model, batch_of(0, micro, mesh)).backward(); };
      if (micro == 1) {
        const auto quiet = model.no_sync();
        backward();
      } else {
        backward();
      }
      loss_of(expected, batch_of(0, micro, mesh)).backward();
    }
    const auto mine = gradients_of(model);
    const auto theirs = gradients_of(expected);
    for (std::size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(testing::allclose(mine[i], theirs[i], 1e-5, 1e-7));
    try {
      const auto quiet = model.no_sync();
      throw std::runtime_error("in between");
    } catch (const std::runtime_error&) {
    }
    const auto before = unit_reports(model.module())[0].reductions;
    loss_of(model, batch_of(0, 0, mesh)).backward();
    EXPECT_EQ(unit_reports(model.module())[0].reductions, before + 1);
    if (mesh.rank() != 0) return;
    const auto warnings = testing_support::warnings_of([&] {
      const auto quiet = model.no_sync();
      set_requires_gradient_sync(model.module(), true);
    });
    EXPECT_THAT(warnings.at(0), HasSubstr("switched on within no_sync"));
  });
}

TEST(Fsdp1Methods, ParametersWithGradients_M16) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    EXPECT_TRUE(model.params_with_grad().empty());
    loss_of(model, batch_of(0, 0, mesh)).backward();
    EXPECT_EQ(model.params_with_grad().size(), model.parameters().size());
  });
}

TEST(Fsdp1Methods, ApplyChangesWholeParameters_M6) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    model.apply([](nn::Module& module) {
      if (auto* linear = module.as<nn::LinearImpl>()) {
        ASSERT_EQ(linear->weight.dim(), 2);
        linear->weight.copy_(torch::arange(linear->weight.numel()).view(linear->weight.sizes()));
      }
    });
    const auto state = full_state_dict(model.module());
    EXPECT_TRUE(testing::equal(state["block1.up.weight"],
                               torch::arange(13 * kWidth).view({13, kWidth}).to(torch::kFloat)));
  });
}

TEST(Gradients, OfGradientsAreRefused_X42_X66_UO11) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    const auto loss = loss_of(model, batch(0, 0, 1));
    EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("gradients that don't require gradients"));
    abandon_step(*model.module());
  });
}

// The factors of section 6.7 for a type that overflows, and for one that does not.
TEST(GradScale, IsPyTorchsTable_GD1_GD2_GD3_T3) {
  const std::vector<std::array<double, 3>> table{{1, 1, 1},   {2, 2, 1},   {3, 2, 1.5}, {4, 2, 2},
                                                 {5, 2, 2.5}, {6, 4, 1.5}, {7, 2, 3.5}, {8, 4, 2},
                                                 {12, 4, 3},  {16, 4, 4},  {32, 8, 4},  {64, 8, 8}};
  for (const auto& [ranks, before, after] : table) {
    const auto half = detail::GradScale::make(ranks, at::kHalf);
    EXPECT_EQ(half.before, before) << ranks;
    EXPECT_EQ(half.after, after) << ranks;
    const auto single = detail::GradScale::make(ranks, at::kFloat);
    EXPECT_EQ(single.before, 1) << ranks;
    EXPECT_EQ(single.after, ranks);
  }
}

// Modules and options -----------------------------------------------------------------------------

TEST(Fsdp1Modules, AreListedOnceInModuleOrder_M5) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    const auto all = fsdp_modules(model.module());
    ASSERT_EQ(all.size(), 4u);
    EXPECT_EQ(all[0].get(), model.module().get());
    EXPECT_EQ(all[2].get(), model->blocks[1].get());
    const auto roots = fsdp_modules(model.module(), /*root_only=*/true);
    ASSERT_EQ(roots.size(), 1u);
    EXPECT_EQ(roots[0], all[0]);
    // Below what is replicated nothing is FSDP's.
    auto whole = make_net({.blocks = 1});
    replicate(whole, mesh);
    EXPECT_TRUE(fsdp_modules(whole).empty());
    Outer outer(mesh, FullyShardedOptions{});
    EXPECT_EQ(fsdp_modules(outer).size(), 1u);
  });
}

std::vector<std::string> mesh_warnings_of(const std::function<void(Mesh&)>& body) {
  return testing_support::warnings_of([&] { run_mesh(2, body); });
}

TEST(Fsdp1Modules, WithoutForwardOrIgnoredAsAWholeWarn_C1_L2_X5) {
  const auto containers = mesh_warnings_of([](Mesh& mesh) {
    nn::ModuleList list(nn::Linear(2, 2));
    const FullyShardedDataParallel<nn::ModuleList> model(list, mesh);
  });
  ASSERT_EQ(containers.size(), 2u);
  EXPECT_THAT(containers[0], HasSubstr("containers that do not implement forward"));
  const auto ignored = mesh_warnings_of([](Mesh& mesh) {
    nn::Linear linear(2, 2);
    const FullyShardedDataParallel<nn::Linear> model(linear, mesh,
                                                     {.ignored_modules = {linear.ptr()}});
    for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.sharded);
  });
  ASSERT_EQ(ignored.size(), 2u);
  EXPECT_THAT(ignored[0], HasSubstr("Trying to ignore the top-level module"));
  // The same of fully_shard does not compile.
  static_assert(!detail::kHasForward<nn::ModuleListImpl> &&
                !detail::kHasForward<nn::ModuleDictImpl>);
  static_assert(detail::kHasForward<nn::LinearImpl>);
}

// Remembers what its forward got.
struct InnerImpl : nn::Module {
  nn::Linear linear{nullptr};
  at::ScalarType seen = at::kDouble;
  InnerImpl() { linear = register_module("linear", nn::Linear(3, 3)); }
  torch::Tensor forward(const torch::Tensor& x) {
    seen = x.scalar_type();
    return linear->forward(x.to(linear->weight.scalar_type()));
  }
};
TESSERA_MODULE(Inner);

struct AroundInnerImpl : nn::Module {
  FullyShardedDataParallel<Inner> inner;
  torch::Tensor scale;
  at::ScalarType seen = at::kDouble;
  AroundInnerImpl(const Mesh& mesh, const FullyShardedOptions& options)
      : inner(Inner(), mesh, options) {
    register_module("inner", inner.module());
    scale = register_parameter("scale", torch::ones({3}));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    seen = x.scalar_type();
    return inner(x.to(torch::kFloat)) * scale;
  }
};
TESSERA_MODULE(AroundInner);

TEST(Fsdp1Options, InputsAreCastByTheRootAndWhereInnerUnitsAreAskedTo_O5_O6) {
  struct Case {
    bool root_casts, all_cast;
    at::ScalarType outer, inner;
  };
  for (const auto& c : {Case{true, false, at::kBFloat16, at::kFloat},
                        Case{true, true, at::kBFloat16, at::kBFloat16},
                        Case{false, false, at::kFloat, at::kFloat}}) {
    run_mesh(2, [&](Mesh& mesh) {
      const FullyShardedOptions options{
          .mixed_precision = {.param_dtype = torch::kBFloat16, .cast_forward_inputs = c.all_cast},
          .cast_root_forward_inputs = c.root_casts};
      FullyShardedDataParallel<AroundInner> model(AroundInner(mesh, options), mesh, options);
      model(torch::ones({1, 3}));
      EXPECT_EQ(model->seen, c.outer);
      EXPECT_EQ(model->inner->seen, c.inner);
    });
  }
}

TEST(Fsdp1Options, OfUnitsOfOneModelMayDiffer_O19) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool inner_stays : {true, false}) {
      const auto strategy = [](bool stays) {
        return FullyShardedOptions{.sharding_strategy = stays ? ShardingStrategy::shard_grad_op
                                                              : ShardingStrategy::full_shard};
      };
      FullyShardedDataParallel<AroundInner> model(AroundInner(mesh, strategy(inner_stays)), mesh,
                                                  strategy(!inner_stays));
      model(torch::ones({1, 3})).sum().backward();
      const auto reports = unit_reports(model.module());
      EXPECT_EQ(reports[1].gathers, inner_stays ? 1u : 2u);
      for (const auto& unit : reports) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
    }
  });
}

TEST(Fsdp1Options, OfEvaluationAreAlikeInAModel_L36) {
  run_mesh(2, [](Mesh& mesh) {
    const FullyShardedOptions inner{
        .mixed_precision = {.param_dtype = torch::kBFloat16, .full_precision_in_eval = true}};
    FullyShardedDataParallel<AroundInner> model(AroundInner(mesh, inner), mesh);
    EXPECT_THAT(error_of([&] {
                  model(torch::ones({1, 3}));
                }),
                HasSubstr("Expects one homogeneous value for full_precision_in_eval"));
  });
}

// A unit inside a module that is ignored, and one that ignores something itself.
struct PartsImpl : nn::Module {
  FullyShardedDataParallel<nn::Linear> unit;
  nn::BatchNorm1d norm{nullptr};
  PartsImpl(const Mesh& mesh, const nn::Linear& linear, const FullyShardedOptions& options)
      : unit(linear, mesh, options) {
    register_module("unit", unit.module());
    norm = register_module("norm", nn::BatchNorm1d(2));
    testing::move_to(mesh.device(), *norm);
  }
  torch::Tensor forward(const torch::Tensor& x) { return norm(unit(x)); }
};
TESSERA_MODULE(Parts);

struct OverPartsImpl : nn::Module {
  Parts parts{nullptr};
  nn::Linear last{nullptr};
  explicit OverPartsImpl(Parts below) {
    parts = register_module("parts", std::move(below));
    last = register_module("last", nn::Linear(2, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) { return call_module(last, parts(x)); }
};
TESSERA_MODULE(OverParts);

std::vector<std::string> sharded_names(const nn::Module& module) {
  std::vector<std::string> names;
  for (const auto& parameter : sharded_parameters(module)) {
    if (parameter.sharded) names.push_back(parameter.name());
  }
  return names;
}

TEST(Fsdp1Ignored, ModulesLeaveOutUnitsBelowThem_IG2_IG6) {
  run_mesh(2, [](Mesh& mesh) {
    Parts parts(mesh, nn::Linear(2, 2), FullyShardedOptions{.use_orig_params = true});
    FullyShardedDataParallel<OverParts> model(
        OverParts(parts), mesh,
        {.mixed_precision = {.cast_forward_inputs = false, .buffer_dtype = torch::kBFloat16},
         .ignored_modules = {parts.ptr()},
         .use_orig_params = true});
    EXPECT_THAT(
        sharded_names(*model.module()),
        ::testing::ElementsAre("parts.unit.weight", "parts.unit.bias", "last.weight", "last.bias"));
    model(torch::randn({4, 2})).sum().backward();
    EXPECT_EQ(parts->norm->running_mean.scalar_type(), at::kFloat);
    EXPECT_EQ(unit_reports(model.module())[1].reductions, 1u);
    EXPECT_TRUE(parts->norm->weight.grad().defined());
  });
}

// The layer's weight is the head's too.
struct SharingImpl : nn::Module {
  FullyShardedDataParallel<nn::Linear> unit;
  testing::Head head{nullptr};
  SharingImpl(const Mesh& mesh, const nn::Linear& linear, const FullyShardedOptions& options)
      : unit(linear, mesh, options) {
    register_module("unit", unit.module());
    head = register_module("head", testing::Head(linear->weight));
  }
  torch::Tensor forward(const torch::Tensor& x) { return head(unit(x)); }
};
TESSERA_MODULE(Sharing);

TEST(Fsdp1Ignored, WhatAUnitIgnoresUnitsAroundItIgnoreToo_IG4_L2_L3) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear shared(2, 2);
    testing::move_to(mesh.device(), {shared->weight});
    const FullyShardedOptions ignoring{.ignored_parameters = {shared->weight}};
    FullyShardedDataParallel<Sharing> sharing(Sharing(mesh, shared, ignoring), mesh);
    EXPECT_THAT(sharded_names(*sharing.module()), ::testing::ElementsAre("unit._flat_param"));
    sharing(torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(shared->weight.grad().defined());
    nn::Linear linear(2, 2);
    testing::move_to(mesh.device(), {linear->bias});
    Parts parts(mesh, linear, FullyShardedOptions{.ignored_parameters = {linear->bias}});
    EXPECT_THAT(sharded_names(*parts), ::testing::ElementsAre("unit._flat_param"));
    const FullyShardedDataParallel<Parts> inner(parts, mesh,
                                                {.ignored_modules = {parts->norm.ptr()}});
    FullyShardedDataParallel<OverParts> model(OverParts(parts), mesh);
    EXPECT_THAT(sharded_names(*model.module()),
                ::testing::ElementsAre("parts.unit._flat_param", "_flat_param"));
    model(torch::randn({4, 2})).sum().backward();
    EXPECT_TRUE(linear->bias.grad().defined());
  });
}

// Scopes and hosts --------------------------------------------------------------------------------

struct ScopedImpl : nn::Module {
  Block block{nullptr};
  Inner inner{nullptr};
  ScopedImpl() {
    block = register_module("block", tessera::wrap(Block()));
    inner = register_module("inner", tessera::wrap(Inner(), [](FullyShardedOptions& options) {
                              options.sharding_strategy = ShardingStrategy::shard_grad_op;
                            }));
  }
  torch::Tensor forward(const torch::Tensor& x) { return inner(block(x).narrow(-1, 0, 3)); }
};
TESSERA_MODULE(Scoped);

TEST(WrapScope, WrapsWhereModulesAreMade_WP7) {
  run_mesh(2, [](Mesh& mesh) {
    EXPECT_TRUE(unit_reports(*Scoped()).empty());
    Scoped made{nullptr};
    {
      const EnableWrap scope(mesh, {.use_orig_params = true});
      made = Scoped();
      EXPECT_THAT(error_of([&] { const EnableWrap nested(mesh); }),
                  HasSubstr("already within an autowrap context"));
    }
    EXPECT_TRUE(unit_reports(*Scoped()).empty());
    FullyShardedDataParallel<Scoped> model(made, mesh, {.use_orig_params = true});
    model(torch::ones({2, kWidth})).sum().backward();
    const auto reports = unit_reports(model.module());
    ASSERT_EQ(reports.size(), 3u);
    EXPECT_EQ(reports[1].gathers, 2u);
    EXPECT_EQ(reports[2].gathers, 1u);  // its own strategy
  });
}

TEST(Hybrid, ShardsOverTheRanksOfAHost_HY1) {
  const auto shard_size = [](Mesh& mesh) {
    auto model = wrap(mesh, {.sharding_strategy = ShardingStrategy::hybrid_shard});
    loss_of(model, batch_of(0, 0, mesh)).backward();
    return model.parameters()[0].mesh->size();
  };
  run_mesh(4, [&](Mesh& mesh) {
    EXPECT_EQ(ranks_of_host(mesh), 4);  // all are here
    EXPECT_EQ(shard_size(mesh), 4);
  });
  setenv("LOCAL_WORLD_SIZE", "2", 1);
  run_mesh(4, [&](Mesh& mesh) { EXPECT_EQ(shard_size(mesh), 2); });
  setenv("LOCAL_WORLD_SIZE", "3", 1);
  run_mesh(4, [&](Mesh& mesh) {
    EXPECT_THAT(error_of([&] { static_cast<void>(ranks_of_host(mesh)); }),
                HasSubstr("LOCAL_WORLD_SIZE=3"));
  });
  unsetenv("LOCAL_WORLD_SIZE");
}

// Optimizers inside of backward -------------------------------------------------------------------

MakeOptimizer make_sgd() {
  return [](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::SGD>(std::move(parameters), testing::sgd_options());
  };
}

TEST(OptimizerInBackward, StepsAsOneAfterIt_UO10_L58) {
  for (const bool rows : {true, false}) {
    run_mesh(2, [&](Mesh& mesh) {
      const auto make = [&] {
        auto net = make_net({});
        if (!rows) return wrap(mesh, {.use_orig_params = true}).module();
        testing::shard(net, mesh);
        return net;
      };
      auto inside = make(), after = make();
      const auto parameters = sharded_parameters(inside);
      apply_optimizer_in_backward(parameters, make_sgd());
      torch::optim::SGD optimizer(local_tensors(sharded_parameters(after)), testing::sgd_options());
      for (int step = 0; step < testing::kSteps; ++step) {
        optimizer.zero_grad();
        loss_of(after, batch_of(step, 0, mesh)).backward();
        optimizer.step();
        loss_of(inside, batch_of(step, 0, mesh)).backward();
        for (const auto& parameter : parameters)
          EXPECT_FALSE(parameter.local.grad().defined()) << parameter.name();
      }
      const auto state = full_state_dict(inside);
      for (const auto& entry : full_state_dict(after))
        EXPECT_TRUE(testing::equal(state[entry.key()], entry.value())) << entry.key();
    });
  }
}

TEST(OptimizerInBackward, IsRefusedWhereGradientsHaveAnotherHome_UO10_L36) {
  run_mesh(2, [](Mesh& mesh) {
    EXPECT_THAT(error_of([&] { apply_optimizer_in_backward(wrap(mesh).parameters(), make_sgd()); }),
                HasSubstr("only supported with use_orig_params=True"));
    auto whole = wrap(mesh, {.sharding_strategy = ShardingStrategy::no_shard});
    EXPECT_THAT(error_of([&] { apply_optimizer_in_backward(whole.parameters(), make_sgd()); }),
                HasSubstr("takes parameters that"));
    // Also one that would get the unit's hook when it is thawed.
    nn::Linear linear(2, 1), frozen(2, 1);
    frozen->weight.set_requires_grad(false);
    replicate(frozen, mesh);
    EXPECT_THAT(
        error_of([&] { apply_optimizer_in_backward({sharded_parameters(frozen)[0]}, make_sgd()); }),
        HasSubstr("takes parameters that"));
    // These parameters are of no unit: libtorch runs the hook.
    apply_optimizer_in_backward(sharded_parameters(linear), make_sgd());
    const auto before = linear->weight.detach().clone();
    linear(torch::ones({1, 2})).sum().backward();
    EXPECT_TRUE(testing::allclose(linear->weight, before - 0.2));
  });
}

}  // namespace
}  // namespace tessera
