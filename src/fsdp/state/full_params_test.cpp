// Whole parameters of sharded models: shown, changed, saved and loaded (spec 6.10, 6.11, T8, T9).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "fsdp/testing/test_model.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::BlockImpl;
using testing::error_of;
using ::testing::HasSubstr;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

enum class SummonKind { rows, rows_bf16, flat, flat_original, hybrid, replicated };
constexpr std::array kSummonKinds{SummonKind::rows,   SummonKind::rows_bf16,
                                  SummonKind::flat,   SummonKind::flat_original,
                                  SummonKind::hybrid, SummonKind::replicated};

Net sharded(const Mesh& mesh, SummonKind kind, bool tied = false) {
  auto net = make_net({.tied = tied});
  if (kind == SummonKind::flat || kind == SummonKind::flat_original) {
    return FullyShardedDataParallel<Net>(net, mesh,
                                         {.auto_wrap_policy = module_wrap_policy<BlockImpl>(),
                                          .use_orig_params = kind == SummonKind::flat_original})
        .module();
  }
  if (kind == SummonKind::replicated) {
    replicate(net, mesh);
    return net;
  }
  ShardOptions options;
  if (kind == SummonKind::rows_bf16) options.mixed_precision.param_dtype = torch::kBFloat16;
  const auto apply = [&](const auto& where) {
    for (auto& block : net->blocks) fully_shard(block, where, options);
    fully_shard(net, where, options);
  };
  if (kind == SummonKind::hybrid) {
    apply(mesh.split(mesh.size() == 4 ? 2 : 1));
  } else {
    apply(mesh);
  }
  return net;
}

void backward(Net& net) {
  net(torch::arange(6).view({2, 3})).to(torch::kFloat).square().mean().backward();
}

TEST(FullParams, ShowsTheModulesValuesAndKeepsChangesOfOwnParts_T8_SF7) {
  for (const int world : {1, 2, 3, 4}) {
    for (const auto kind : kSummonKinds) {
      run_mesh(world, [&](Mesh& mesh) {
        auto plain = make_net({.tied = true});
        auto net = sharded(mesh, kind, true);
        {
          const FullParams whole(net);
          const auto expected = plain->parameters(), mine = net->parameters();
          const torch::NoGradGuard no_grad;
          for (std::size_t i = 0; i < mine.size(); ++i)
            EXPECT_TRUE(testing::equal(mine[i], expected[i])) << i;
          for (const auto& parameter : net->parameters())
            parameter.mul_(0.5);  // the tied one twice
        }
        // What stays in its place keeps every change (SF7).
        const bool is_sharded = sharded_parameters(net)[0].sharded;
        {
          const FullParams whole(net, {.writeback = false});
          const torch::NoGradGuard no_grad;
          for (const auto& parameter : net->blocks[0]->parameters()) {
            if (is_sharded) parameter.zero_();
          }
        }
        const auto state = full_state_dict(net);
        for (const auto& entry : plain->named_parameters()) {
          const bool tied = entry.key() == "embed.weight" || entry.key() == "head.weight";
          EXPECT_TRUE(
              testing::equal(state[entry.key()], entry.value().detach() * (tied ? 0.25 : 0.5)))
              << entry.key();
        }
        backward(net);
        for (const auto& unit : unit_reports(net)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
      });
    }
  }
}

// What happens to the shards inside of the scope lasts, and what reads them has the scope's
// changes: as in PyTorch's summon_full_params.
TEST(FullParams, AndShardsTellEachOtherWhatChanged) {
  for (const auto kind : kSummonKinds) {
    run_mesh(2, [&](Mesh& mesh) {
      const torch::NoGradGuard no_grad;
      auto net = sharded(mesh, kind);
      const bool is_in_place = kind == SummonKind::replicated;
      auto expected = full_state_dict(net);
      const auto names = expected.keys();
      const auto expect_now = [&](const char* when) {
        const auto now = full_state_dict(net);
        for (const auto& name : names) {
          EXPECT_TRUE(torch::allclose(now[name].cpu(), expected[name].cpu(), 1e-6, 1e-6,
                                      /*equal_nan=*/true))
              << name << " " << when << ", kind " << static_cast<int>(kind);
        }
      };
      {
        const FullParams whole(net);
        net->head->weight.mul_(2);
        expected["head.weight"].mul_(2);
        expect_now("changed inside");
        net->head->weight[0][0] = std::nan("");
        expected["head.weight"][0][0] = std::nan("");
        expect_now("no number");
        for (auto& parameter : sharded_parameters(net)) parameter.local.sub_(1);
        for (const auto& name : names) expected[name].sub_(1);
        expect_now("a step inside");
        // What is no number is not equal to itself, and was not changed.
        for (auto& parameter : sharded_parameters(net)) parameter.local.nan_to_num_(7);
        for (const auto& name : names) expected[name].nan_to_num_(7);
        expect_now("a number again");
        // The whole tensor has not seen the step, and its value counts.
        net->blocks[0]->up->bias.fill_(3);
        expected["block0.up.bias"].fill_(3);
        expect_now("changed after it");
      }
      expect_now("after the scope");
      {
        const FullParams whole(net);
        auto other = make_net({});
        for (auto& parameter : other->parameters()) parameter.mul_(0.25);
        const auto state = full_state_dict(other);
        load_full_state_dict(net, state);
        expected = full_state_dict(other);
        EXPECT_TRUE(testing::equal(net->head->weight, expected["head.weight"]));
        expect_now("loaded inside");
        net->head->weight.set_data(torch::full_like(net->head->weight, 5));
        expected["head.weight"].fill_(5);
      }
      expect_now("loaded and replaced inside");
      {
        const FullParams whole(net, {.writeback = false});
        if (!is_in_place) net->head->weight.mul_(2);
        for (auto& parameter : sharded_parameters(net)) parameter.local.sub_(1);
        for (const auto& name : names) expected[name].sub_(1);
      }
      expect_now("without writeback");
    });
  }
}

TEST(FullParams, OfRankZeroOnlyLeaveOthersWithoutData_SF5) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_net({});
    auto net = sharded(mesh, SummonKind::rows);
    const FullParams whole(net, {.writeback = false, .rank0_only = true});
    const auto read = [&] { return net->embed->weight.detach().sum().item<double>(); };
    if (mesh.rank() == 0) {
      EXPECT_EQ(read(), plain->embed->weight.sum().item<double>());
    } else {
      EXPECT_ANY_THROW(static_cast<void>(read()));
    }
  });
}

TEST(FullParams, WithGradientsShowAndKeepThem_SF9) {
  for (const auto kind : {SummonKind::rows, SummonKind::flat_original, SummonKind::flat}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto plain = make_net({});
      auto net = sharded(mesh, kind);
      backward(plain);
      backward(net);
      {
        const FullParams whole(net, {.with_grads = true});
        const auto expected = plain->parameters(), mine = net->parameters();
        for (std::size_t i = 0; i < mine.size(); ++i) {
          EXPECT_TRUE(testing::allclose(mine[i].grad(), expected[i].grad(), 1e-5, 1e-7)) << i;
          mine[i].mutable_grad().mul_(2);
        }
      }
      double sum = 0, expected_sum = 0;
      for (const auto& parameter : sharded_parameters(net)) {
        const auto& gradient = parameter.local.grad();
        // With original parameters there is none of what this rank does not hold.
        EXPECT_EQ(gradient.defined(),
                  kind != SummonKind::flat_original || parameter.local.numel() > 0);
        if (gradient.defined()) sum += gradient.sum().item<double>();
      }
      for (const auto& parameter : plain->parameters())
        expected_sum += 2 * parameter.grad().sum().item<double>();
      EXPECT_NEAR(mesh.all_reduce_sum(sum), expected_sum, 1e-4);
    });
  }
}

TEST(FullParams, AreRefusedWhereTheyWouldBeWrong_SF2_SF3) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = sharded(mesh, SummonKind::rows);
    EXPECT_THAT(error_of([&] { const FullParams whole(net, {.rank0_only = true}); }),
                HasSubstr("writeback=True and rank0_only=True is not supported"));
    {
      const FullParams whole(net);
      EXPECT_THAT(error_of([&] { const FullParams again(net); }), HasSubstr("shown whole already"));
      EXPECT_THAT(error_of([&] { backward(net); }), HasSubstr("while its parameters are shown"));
    }
    abandon_step(net);
    backward(net);
  });
}

TEST(FullState, RoundTripsBetweenWorldsAndKinds_T9) {
  FullState saved;
  {
    auto plain = make_net({.tied = true});
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : plain->parameters()) parameter.add_(1);
    saved = full_state_dict(plain);
  }
  for (const int world : {1, 2, 3, 4}) {
    for (const auto kind : kSummonKinds) {
      run_mesh(world, [&](Mesh& mesh) {
        auto net = sharded(mesh, kind, true);
        load_full_state_dict(net, saved);
        const auto state = full_state_dict(net);
        ASSERT_EQ(state.size(), saved.size());
        for (std::size_t i = 0; i < saved.size(); ++i) {
          EXPECT_EQ(state[i].key(), saved[i].key());
          EXPECT_TRUE(testing::equal(state[i].value(), saved[i].value())) << saved[i].key();
        }
        const auto alone = full_state_dict(net, {.rank0_only = true});
        if (kind != SummonKind::replicated && kind != SummonKind::hybrid && mesh.size() > 1) {
          EXPECT_EQ(alone.size(), mesh.rank() == 0 ? saved.size() : 0u);
        }
      });
    }
  }
}

TEST(FullState, ThatDoesNotFitChangesNothing) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = sharded(mesh, SummonKind::flat);
    const auto before = full_state_dict(net);
    auto missing = full_state_dict(net);
    missing.erase("block1.up.bias");
    EXPECT_THAT(error_of([&] { load_full_state_dict(net, missing); }), HasSubstr("block1.up.bias"));
    FullState wrong;
    for (const auto& entry : before) {
      wrong.insert(entry.key(),
                   entry.key() == "head.weight" ? torch::zeros({2, 2}) : entry.value() + 1);
    }
    EXPECT_THAT(error_of([&] { load_full_state_dict(net, wrong); }), HasSubstr("[2, 2]"));
    auto more = full_state_dict(net);
    more.insert("extra", torch::ones({1}));
    EXPECT_THAT(error_of([&] { load_full_state_dict(net, more); }), HasSubstr("extra"));
    const auto after = full_state_dict(net);
    for (const auto& entry : before) EXPECT_TRUE(testing::equal(entry.value(), after[entry.key()]));
  });
}

// Nor does a load in the middle of a pass, though tensors of no unit come first.
TEST(FullState, ThatComesInABackwardChangesNothing) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.blocks = 2});
    fully_shard(net->blocks[1], mesh);
    const auto before = full_state_dict(net);
    FullState zeros;
    for (const auto& entry : before) zeros.insert(entry.key(), torch::zeros_like(entry.value()));
    auto x = net->embed(torch::arange(6).view({2, 3}));
    std::string text;
    x.register_hook(
        [&](const at::Tensor&) { text = error_of([&] { load_full_state_dict(net, zeros); }); });
    net->blocks[1](x).sum().backward();
    EXPECT_THAT(text, HasSubstr("in a forward or backward"));
    const auto after = full_state_dict(net);
    for (const auto& entry : before)
      EXPECT_TRUE(testing::equal(after[entry.key()], entry.value())) << entry.key();
  });
}

TEST(FullParams, OfOneUnitAloneLeaveTheOthers_SF1_M13) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_net({});
    auto net = sharded(mesh, SummonKind::flat);
    const FullParams whole(net, {.recurse = false});
    EXPECT_TRUE(testing::equal(net->embed->weight, plain->embed->weight));
    EXPECT_ANY_THROW(static_cast<void>(net->blocks[0]->up->weight.sum().item<double>()));
  });
}

// Two roots below a module that is none.
struct TwinsImpl : nn::Module {
  nn::Linear first{nullptr}, second{nullptr};
  TwinsImpl() {
    first = register_module("first", nn::Linear(2, 2));
    second = register_module("second", nn::Linear(2, 2));
  }
};
TORCH_MODULE(Twins);

TEST(FullParams, OfSeveralRootsUnwindWhenOneFails_SF1) {
  run_mesh(2, [](Mesh& mesh) {
    Twins twins;
    const auto expected = twins->first->weight.detach().clone();
    sync_module_states(twins, mesh);
    fully_shard(twins->first, mesh);
    fully_shard(twins->second, mesh);
    const auto reads = [](const nn::Linear& linear) {
      return error_of([&] { call_module(linear, torch::ones({1, 2})); });
    };
    {
      const FullParams whole(twins);
      EXPECT_EQ(twins->first->weight.detach().numel(), expected.numel());
      EXPECT_GT(twins->second->weight.abs().sum().item<double>(), 0);
    }
    {
      const FullParams second(twins->second);
      EXPECT_THAT(error_of([&] { const FullParams both(twins); }),
                  HasSubstr("shown whole already"));
      // The first is as it was.
      EXPECT_ANY_THROW(static_cast<void>(twins->first->weight.sum().item<double>()));
      EXPECT_EQ(reads(twins->first), "no Error");
    }
    EXPECT_EQ(reads(twins->second), "no Error");
  });
}

// On the CPU the copy is the gathered array itself.
TEST(FullParams, OnTheCpuAreWrittenBack_SF6_FH4) {
  for (const auto kind : {SummonKind::rows, SummonKind::flat, SummonKind::flat_original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = sharded(mesh, kind);
      {
        const FullParams whole(net, {.offload_to_cpu = true});
        const torch::NoGradGuard no_grad;
        EXPECT_TRUE(net->head->weight.is_cpu());
        EXPECT_TRUE(net->head->weight.requires_grad());
        net->head->weight.fill_(2);
      }
      EXPECT_EQ(full_state_dict(net)["head.weight"].min().item<float>(), 2);
    });
  }
}

TEST(FullParams, WithGradientsLeaveOutThoseThatNoRankHas_SF9) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    net->blocks[1]->up->bias.requires_grad_(false);
    net = FullyShardedDataParallel<Net>(net, mesh, {.use_orig_params = true}).module();
    backward(net);
    const FullParams whole(net, {.with_grads = true});
    EXPECT_FALSE(net->blocks[1]->up->bias.grad().defined());
    EXPECT_TRUE(net->blocks[1]->up->weight.grad().defined());
    EXPECT_EQ(net->blocks[1]->up->weight.grad().sizes(), net->blocks[1]->up->weight.sizes());
    EXPECT_THAT(error_of([&] {
                  const FullParams offloaded(net, {.offload_to_cpu = true, .with_grads = true});
                }),
                HasSubstr("with_grads=True and offload_to_cpu=True"));
  });
}

}  // namespace
}  // namespace tessera
