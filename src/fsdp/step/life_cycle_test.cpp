// What happens to units in the less usual lives: frozen, partly ignored, inside other modules,
// moved.
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "fsdp/step/root.h"
#include "fsdp/testing/test_training.h"
#include "fsdp/unit/registry.h"
#include "fsdp/unit/whole_parameters.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/trace.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::batch;
using testing::batch_of;
using testing::BlockImpl;
using testing::error_of;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::with_values;

bool is_freed(const Net& net) {
  for (const auto& unit : unit_reports(net)) {
    if (unit.gathered_bytes > 0) return false;
  }
  return true;
}

ShardedParameter named(const std::vector<ShardedParameter>& parameters, const std::string& name) {
  for (const auto& parameter : parameters) {
    if (parameter.name() == name) return parameter;
  }
  ADD_FAILURE() << "no parameter " << name;
  return {};
}

TEST(LifeCycle, OfAUnitThatIsFrozenAsAWhole_L60_T13) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_net({});
    auto net = make_net({});
    for (auto* model : {&plain, &net}) {
      for (auto& parameter : (*model)->blocks[1]->parameters()) parameter.requires_grad_(false);
    }
    testing::shard(net, mesh);
    loss_of(plain, batch(0, 0, 2)).backward();
    loss_of(net, batch_of(0, 0, mesh)).backward();
    EXPECT_TRUE(is_freed(net));
    const auto expected = sharded_parameters(plain);
    for (const auto& parameter : sharded_parameters(net)) {
      const auto whole = named(expected, parameter.name()).local.grad();
      const auto& mine = parameter.local.grad();
      EXPECT_EQ(mine.defined(), whole.defined()) << parameter.name();
      if (!mine.defined()) continue;
      EXPECT_TRUE(
          testing::allclose(mine, whole.narrow(0, parameter.offset, mine.size(0)), 1e-4, 1e-6))
          << parameter.name();
    }
  });
}

TEST(LifeCycle, GradientSyncOfOneUnitAlone_F24) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    set_requires_gradient_sync(net, false, /*recurse=*/false);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    const auto parameters = sharded_parameters(net);
    EXPECT_FALSE(named(parameters, "head.weight").local.grad().defined());
    EXPECT_TRUE(named(parameters, "block0.up.weight").local.grad().defined());
    set_requires_gradient_sync(net, true);
    loss_of(net, batch_of(0, 0, mesh)).backward();
    auto once = make_net({});
    testing::shard(once, mesh);
    loss_of(once, batch_of(0, 0, mesh)).backward();
    const auto expected = sharded_parameters(once);
    for (const auto* name : {"head.weight", "block0.up.weight"}) {
      EXPECT_TRUE(testing::allclose(named(parameters, name).local.grad(),
                                    2 * named(expected, name).local.grad(), 1e-5, 1e-7));
    }
  });
}

TEST(LifeCycle, IgnoredParametersStayWhole_F7) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::move_to(mesh.device(), *net->head);
    fully_shard(net, mesh, {.ignored_parameters = {net->head->weight}});
    const auto head = named(sharded_parameters(net), "head.weight");
    EXPECT_FALSE(head.sharded);
    EXPECT_EQ(head.local.data_ptr(), net->head->weight.data_ptr());
    loss_of(net, batch_of(0, 0, mesh)).backward();
    // Each rank keeps the gradient of its own batch.
    const double mine = head.local.grad().abs().sum().item<double>();
    EXPECT_GT(std::abs(mesh.all_reduce_sum(mine) - 2 * mine), 1e-7);
  });
}

TEST(LifeCycle, OfAModelWhoseDtypeIsMixedIsRefused_MP10) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(2, 2);
    linear->bias.set_data(linear->bias.data().to(torch::kHalf));
    EXPECT_THAT(error_of([&] { fully_shard(linear, mesh); }), HasSubstr("one dtype"));
  });
}

TEST(LifeCycle, AModelCastAfterShardingIsAnError_6_16) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    std::string text;
    try {
      net->to(torch::kDouble);
    } catch (const c10::Error& error) {
      text = error.what();
    }
    EXPECT_THAT(text, HasSubstr("were used while they are sharded"));
  });
}

// A sharded model as part of one that is not.
struct AroundImpl : nn::Module {
  Net net{nullptr};
  nn::Linear extra{nullptr};
  AroundImpl() {
    net = register_module("net", make_net({.blocks = 1}));
    extra = register_module("extra", nn::Linear(testing::kVocabulary, testing::kVocabulary));
    const torch::NoGradGuard no_grad;
    extra->weight.fill_(0.1);
    extra->bias.fill_(0.2);
  }
  torch::Tensor forward(const torch::Tensor& tokens) { return extra(net(tokens)); }
};
TESSERA_MODULE(Around);

TEST(LifeCycle, InsideAModuleThatIsNotSharded_SD6_CG4) {
  Around plain;
  loss_of(plain, batch(0, 0, 1)).backward();
  const double expected = nn::utils::clip_grad_norm_(plain->parameters(), 0.1);
  run_mesh(2, [&](Mesh& mesh) {
    Around around;
    for (auto& block : around->net->blocks) fully_shard(block, mesh);
    fully_shard(around->net, mesh);
    testing::move_to(mesh.device(), *around->extra);
    const auto state = full_state_dict(around);
    for (const auto& entry : plain->named_parameters()) {
      ASSERT_TRUE(state.contains(entry.key())) << entry.key();
      EXPECT_TRUE(testing::equal(state[entry.key()], entry.value().detach())) << entry.key();
    }
    // The same batch on all ranks: the gradients of what is not sharded are alike.
    loss_of(around, batch(0, 0, 1)).backward();
    EXPECT_NEAR(clip_grad_norm(sharded_parameters(around), 0.1), expected, 1e-5 * expected);
    EXPECT_TRUE(
        testing::allclose(around->extra->weight.grad(), plain->extra->weight.grad(), 1e-4, 1e-7));
  });
}

struct CuriousImpl : nn::Module {
  nn::Linear linear{nullptr};
  CuriousImpl() { linear = register_module("linear", nn::Linear(2, 2)); }
  torch::Tensor forward(const torch::Tensor& x) {
    const FullParams whole(*this);
    return linear(x);
  }
};
TESSERA_MODULE(Curious);

TEST(LifeCycle, WholeParametersInsideAForwardAreRefused_SF3) {
  run_mesh(2, [](Mesh& mesh) {
    Curious curious;
    fully_shard(curious, mesh);
    EXPECT_THAT(error_of([&] {
                  curious(torch::ones({1, 2}));
                }),
                HasSubstr("in a forward or backward"));
  });
}

TEST(LifeCycle, WholeParametersOfAllRanksOnTheCpuWarn_SF2_X47) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(2, [](Mesh& mesh) {
      nn::Linear linear(2, 2);
      fully_shard(linear, mesh);
      const FullParams whole(linear, {.offload_to_cpu = true});
      EXPECT_TRUE(linear->weight.is_cpu());
    });
  });
  ASSERT_EQ(warnings.size(), 2u);
  EXPECT_THAT(warnings[0], HasSubstr("offload_to_cpu=True and rank0_only=False"));
}

// Several modules as one unit ---------------------------------------------------------------------

// An output layer and the norm before it, or the embedding whose weight it has, may be one unit.
struct TailImpl : nn::Module {
  nn::Embedding embed{nullptr};
  testing::Block block{nullptr};
  nn::LayerNorm norm{nullptr};
  testing::Head head{nullptr};
  bool uses_norm = true;
  explicit TailImpl(bool tied) {
    embed = register_module("embed", nn::Embedding(testing::kVocabulary, testing::kWidth));
    block = register_module("block", testing::Block());
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({testing::kWidth})));
    const auto own = torch::ones({testing::kVocabulary, testing::kWidth}) * 0.1;
    head = register_module("head", testing::Head(tied ? embed->weight : own));
  }
  torch::Tensor forward(const torch::Tensor& tokens) {
    auto x = block(call_module(embed, tokens));
    return head(uses_norm ? call_module(norm, x) : x);
  }
};
TESSERA_MODULE(Tail);

Tail make_tail(bool tied) {
  return with_values(Tail(tied), 5);
}

void expect_gradients_of(const Tail& plain, const Tail& sharded) {
  const auto expected = sharded_parameters(plain);
  for (const auto& parameter : sharded_parameters(sharded)) {
    const auto whole = named(expected, parameter.name()).local.grad();
    const auto& mine = parameter.local.grad();
    ASSERT_TRUE(mine.defined()) << parameter.name();
    EXPECT_TRUE(
        testing::allclose(mine, whole.narrow(0, parameter.offset, mine.size(0)), 1e-4, 1e-6))
        << parameter.name();
  }
}

TEST(SeveralModules, AreGatheredAndReducedTogether_F1) {
  for (const bool tied : {false, true}) {
    auto plain = make_tail(tied);
    loss_of(plain, batch(0, 0, 2)).backward();
    run_mesh(2, [&](Mesh& mesh) {
      auto tail = make_tail(tied);
      fully_shard(tail->block, mesh);
      if (tied) {
        fully_shard({tail->embed, tail->head}, mesh);
      } else {
        fully_shard({tail->norm, tail->head}, mesh);
      }
      fully_shard(tail, mesh);
      loss_of(tail, batch_of(0, 0, mesh)).backward();
      const auto reports = unit_reports(tail);
      ASSERT_EQ(reports.size(), 3u);
      const auto& group = reports[tied ? 1 : 2];
      EXPECT_EQ(group.name, tied ? "embed" : "norm");
      EXPECT_EQ(group.gathers, 2u);
      EXPECT_EQ(group.reductions, 1u);
      for (const auto& unit : reports) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
      expect_gradients_of(plain, tail);
    });
  }
}

TEST(SeveralModules, OfWhichOnlySomeAreCalledAreFreedWithTheOutermostCall_F1) {
  run_mesh(2, [](Mesh& mesh) {
    auto tail = make_tail(false);
    tail->uses_norm = false;
    fully_shard({tail->norm, tail->head}, mesh);
    fully_shard(tail, mesh);
    const auto loss = loss_of(tail, batch_of(0, 0, mesh));
    EXPECT_EQ(unit_reports(tail)[1].gathered_bytes, 0u);
    loss.backward();
    EXPECT_EQ(unit_reports(tail)[1].reductions, 1u);
    EXPECT_FALSE(named(sharded_parameters(tail), "norm.weight").local.grad().defined());
    EXPECT_TRUE(named(sharded_parameters(tail), "head.weight").local.grad().defined());
    for (const auto& unit : unit_reports(tail)) EXPECT_EQ(unit.gathered_bytes, 0u) << unit.name;
  });
}

TEST(SeveralModules, CountContainedOnesOnceAndAreNoRoot_F1) {
  run_mesh(2, [](Mesh& mesh) {
    auto tail = make_tail(false);
    fully_shard({tail->block, tail->block->up, tail->norm}, mesh);
    EXPECT_EQ(unit_reports(tail).size(), 1u);
    EXPECT_EQ(unit_reports(tail->block).size(), 1u);
    EXPECT_THAT(error_of([&] { fully_shard(tail->norm, mesh); }), HasSubstr("already"));
    EXPECT_THAT(error_of([&] {
                  call_module(tail->norm, torch::ones({1, testing::kWidth}));
                }),
                HasSubstr("FSDP requires a single root module"));
  });
}

// Messages, storages, types -----------------------------------------------------------------------

thread_local int broadcasts = 0;  // of this thread's libtorch operators
std::unique_ptr<at::ObserverContext> count_broadcast(const at::RecordFunction& function) {
  if (std::string_view(function.name()) == "c10d::broadcast_") ++broadcasts;
  return nullptr;
}

TEST(Broadcast, SplitsWhatIsTooLargeForAMessage_K4) {
  static_assert(detail::kBroadcastBytes == 250u * 1024 * 1024);
  run_mesh(2, [](Mesh& mesh) {
    const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(count_broadcast));
    for (const auto& [bytes, messages] : {std::pair{4000u, 3}, std::pair{1u << 20, 1}}) {
      std::vector<at::Tensor> tensors;
      for (int i = 0; i < 3; ++i) tensors.push_back(torch::full({1000}, 10.f * mesh.rank() + i));
      broadcasts = 0;
      detail::broadcast_from_first(tensors, mesh, bytes);
      EXPECT_EQ(broadcasts, messages);
      for (int i = 0; i < 3; ++i)
        EXPECT_TRUE(testing::equal(tensors[i], torch::full({1000}, static_cast<float>(i))));
    }
    at::removeCallback(handle);
  });
}

TEST(LifeCycle, UnitsAreNumberedInModuleOrder_L35) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    loss_of(net, batch(0, 0, 1));
    const auto units = detail::units_below(*net);
    ASSERT_EQ(units.size(), 4u);
    for (std::size_t i = 0; i < units.size(); ++i) {
      EXPECT_EQ(entry_of(*units[i].second).id, static_cast<int>(i));
      EXPECT_EQ(units[i].second->name(), units[i].first);
    }
  });
}

TEST(LifeCycle, AViewThatIsKeptThrowsWhileItsUnitIsFreed_FH5) {
  run_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(3, 4);
    fully_shard(linear, mesh);
    unshard(linear);
    const auto view = linear->weight.detach().narrow(0, 1, 2);
    const double sum = view.sum().item<double>();
    reshard(linear);
    EXPECT_ANY_THROW(static_cast<void>(view.sum().item<double>()));
    unshard(linear);
    EXPECT_EQ(view.sum().item<double>(), sum);
  });
}

struct TableImpl : nn::Module {
  torch::Tensor places;
  explicit TableImpl(const torch::Tensor& given) {
    places = register_parameter("places", given, /*requires_grad=*/false);
  }
  torch::Tensor forward(const torch::Tensor& x) { return x.take(places); }
};

TEST(LifeCycle, IntegersAreNeitherCastNorReduced_P6) {
  run_mesh(2, [](Mesh& mesh) {
    const auto places = torch::arange(6).view({3, 2});
    auto table = std::make_shared<TableImpl>(places.clone());
    fully_shard(table, mesh, {.mixed_precision = {.param_dtype = torch::kBFloat16}});
    auto x = torch::arange(6, torch::kFloat).requires_grad_();
    const auto y = call_module(table, x);
    EXPECT_EQ(sharded_parameters(table)[0].local.scalar_type(), at::kLong);
    y.to(torch::kFloat).sum().backward();
    EXPECT_TRUE(testing::equal(x.grad(), torch::ones({6})));
    EXPECT_EQ(unit_reports(table)[0].reductions, 0u);
    EXPECT_TRUE(testing::equal(full_state_dict(table)["places"], places));
  });
}

// FSDP1 -------------------------------------------------------------------------------------------

TEST(Fsdp1LifeCycle, OneRankShardsNothingAndWarns_C3_L8) {
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(1, [](Mesh& mesh) {
      const FullyShardedDataParallel<nn::Linear> model(nn::Linear(3, 2), mesh);
      for (const auto& parameter : model.parameters()) EXPECT_FALSE(parameter.sharded);
      EXPECT_EQ(model->weight.sum().dim(), 0);  // has its data
    });
  });
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_THAT(warnings[0], HasSubstr("switching to use `NO_SHARD`"));
}

TEST(Fsdp1LifeCycle, GathersAsTheEnumeratorsSay_E2) {
  run_mesh(4, [](Mesh& mesh) {
    const std::vector<std::pair<ShardingStrategy, std::uint64_t>> gathers{
        {ShardingStrategy::full_shard, 2},
        {ShardingStrategy::shard_grad_op, 1},
        {ShardingStrategy::no_shard, 0},
        {ShardingStrategy::hybrid_shard, 2},
        {ShardingStrategy::hybrid_shard_zero2, 1}};
    for (const auto& [strategy, count] : gathers) {
      const FullyShardedOptions options{.sharding_strategy = strategy,
                                        .auto_wrap_policy = module_wrap_policy<BlockImpl>()};
      const bool hybrid = strategy == ShardingStrategy::hybrid_shard ||
                          strategy == ShardingStrategy::hybrid_shard_zero2;
      auto model = hybrid ? FullyShardedDataParallel<Net>(make_net({}), mesh.split(2), options)
                          : FullyShardedDataParallel<Net>(make_net({}), mesh, options);
      loss_of(model, batch(0, 0, 1)).backward();
      for (const auto& unit : unit_reports(model.module())) {
        EXPECT_EQ(unit.gathers, unit.name.empty() ? std::min<std::uint64_t>(count, 1) : count);
      }
    }
  });
}

TEST(Fsdp1LifeCycle, RankZerosStatesFirstWhenAsked_C11_HY6) {
  run_mesh(4, [](Mesh& mesh) {
    for (const bool hybrid : {false, true}) {
      nn::BatchNorm1d norm(6);
      {
        const torch::NoGradGuard no_grad;
        norm->weight.fill_(mesh.rank() + 5);
        norm->running_mean.fill_(mesh.rank() + 7);
      }
      FullyShardedOptions options{.sync_module_states = true};
      if (hybrid) options.sharding_strategy = ShardingStrategy::hybrid_shard;
      const auto model =
          hybrid ? FullyShardedDataParallel<nn::BatchNorm1d>(norm, mesh.split(2), options)
                 : FullyShardedDataParallel<nn::BatchNorm1d>(norm, mesh, options);
      const auto state = full_state_dict(model.module());
      EXPECT_TRUE(testing::equal(state["weight"], torch::full({6}, 5.0f)));
      EXPECT_TRUE(testing::equal(state["running_mean"], torch::full({6}, 7.0f)));
    }
  });
}

TEST(Fsdp1LifeCycle, OriginalParametersAreFrozenAndUnusedOneByOne_UO1_UO6) {
  run_mesh(2, [](Mesh& mesh) {
    auto plain = make_net({.blocks = 1});
    auto net = make_net({.blocks = 1});
    for (auto* model : {&plain, &net}) (*model)->blocks[0]->up->bias.requires_grad_(false);
    // Nobody uses it.
    net->register_parameter("spare", torch::ones({5}));
    FullyShardedDataParallel<Net> model(net, mesh, {.use_orig_params = true});
    const auto parameters = model.parameters();
    std::vector<torch::Tensor> matrices, rest;
    for (const auto& parameter : parameters)
      (parameter.shape.size() > 1 ? matrices : rest).push_back(parameter.local);
    torch::optim::SGD optimizer(matrices, torch::optim::SGDOptions(0.2));
    torch::optim::SGD slower(rest, torch::optim::SGDOptions(0.05));
    loss_of(model, batch_of(0, 0, mesh)).backward();
    loss_of(plain, batch(0, 0, 2)).backward();
    EXPECT_FALSE(named(parameters, "block0.up.bias").local.grad().defined());
    EXPECT_FALSE(named(parameters, "spare").local.grad().defined());
    optimizer.step();
    slower.step();
    const auto state = full_state_dict(model.module());
    for (const auto& entry : plain->named_parameters()) {
      auto expected = entry.value().detach().clone();
      if (entry.value().grad().defined())
        expected -= (expected.dim() > 1 ? 0.2 : 0.05) * entry.value().grad();
      EXPECT_TRUE(testing::allclose(state[entry.key()], expected, 1e-4, 1e-6)) << entry.key();
    }
  });
}

}  // namespace
}  // namespace tessera
