// FullyShardedDataParallel's methods, and what it refuses (spec 6.2, CH, NS, CG1).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "base/log.h"
#include "fsdp/grad_reducer.h"
#include "fsdp/test_training.h"
#include "tessera/error.h"
#include "tessera/fully_sharded_data_parallel.h"
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
            EXPECT_TRUE(torch::allclose(mine[i], expected[i], tolerance, tolerance / 10));
            // A hook that casts is seen to.
            if (tolerance > 1e-4 && mine[i].numel() > 20) {
              EXPECT_FALSE(torch::equal(mine[i], expected[i]));
            }
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
      for (const auto& parameter : model.parameters()) {
        EXPECT_TRUE(torch::equal(parameter.local.grad(), torch::full_like(parameter.local, 7)));
      }
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

TEST(Fsdp1Methods, AChildThatRanFirstIsNoChild_X26_L36_R2) {
  run_mesh(2, [](Mesh& mesh) {
    FullyShardedDataParallel<Outer> outer(Outer(mesh, FullyShardedOptions{}), mesh);
    outer->inner(torch::ones({1, kWidth}));
    EXPECT_THAT(error_of([&] {
                  outer(torch::ones({1, kWidth}));
                }),
                HasSubstr("requires running forward through the root module first"));
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
  std::vector<std::string> warnings;
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
      EXPECT_TRUE(torch::allclose(mine[i], theirs[i], 1e-5, 1e-7));
    try {
      const auto quiet = model.no_sync();
      throw std::runtime_error("in between");
    } catch (const std::runtime_error&) {
    }
    const auto before = unit_reports(model.module())[0].reductions;
    loss_of(model, batch_of(0, 0, mesh)).backward();
    EXPECT_EQ(unit_reports(model.module())[0].reductions, before + 1);
    if (mesh.rank() != 0) return;
    set_log([&](LogLevel level, std::string_view text) {
      if (level == LogLevel::warning) warnings.emplace_back(text);
    });
    {
      const auto quiet = model.no_sync();
      set_requires_gradient_sync(model.module(), true);
    }
    set_log({});
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
    EXPECT_TRUE(torch::equal(state["block1.up.weight"],
                             torch::arange(13 * kWidth).view({13, kWidth}).to(torch::kFloat)));
  });
}

TEST(Gradients, OfGradientsAreRefused_X42_X66_UO11) {
  run_mesh(2, [](Mesh& mesh) {
    auto model = wrap(mesh);
    const auto loss = loss_of(model, batch(0, 0, 1));
    EXPECT_THAT(error_of([&] { loss.backward({}, /*retain_graph=*/true, /*create_graph=*/true); }),
                HasSubstr("gradients that don't require gradients"));
    reset(*model.module());
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

}  // namespace
}  // namespace tessera
