// Models that are built without data get the values of models that are built with it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>
#include <string>
#include <vector>

#include "fsdp/testing/test_model.h"
#include "tessera/ddp.h"
#include "tessera/deferred_init.h"
#include "tessera/error.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using testing::BlockImpl;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::make_net;
using testing::Net;
using testing::run_mesh;

// The code of the Error that `act` throws, its text in `what`.
template <typename Act>
std::optional<ErrorCode> failure_of(const Act& act, std::string* what = nullptr) {
  try {
    act();
  } catch (const Error& e) {
    if (what != nullptr) *what = e.what();
    return e.code();
  }
  return std::nullopt;
}

using Tensors = torch::OrderedDict<std::string, torch::Tensor>;

Tensors states_of(const nn::Module& module) {
  auto states = module.named_parameters();
  states.update(module.named_buffers());
  return states;
}

void expect_same(const Tensors& expected, const Tensors& found) {
  ASSERT_EQ(expected.keys(), found.keys());
  for (const auto& entry : expected) {
    const auto& mine = found[entry.key()];
    ASSERT_TRUE(mine.device() == entry.value().device()) << entry.key();
    EXPECT_EQ(mine.scalar_type(), entry.value().scalar_type()) << entry.key();
    EXPECT_EQ(mine.strides(), entry.value().strides()) << entry.key();
    EXPECT_EQ(mine.requires_grad(), entry.value().requires_grad()) << entry.key();
    EXPECT_TRUE(testing::equal(mine, entry.value())) << entry.key();
  }
}

// Many ways to make tensors: with and without random numbers, generators, views, values.
struct ZooImpl : nn::Module {
  torch::Tensor weight, shared;
  explicit ZooImpl(std::int64_t n) {
    add_modules(n);
    add_parameters(n);
    add_buffers(n);
  }
  void add_modules(std::int64_t n) {
    const auto linear = register_module("linear", nn::Linear(n, n + 1));
    register_module("norm", nn::BatchNorm1d(n));
    register_module("embed", nn::Embedding(nn::EmbeddingOptions(n, 4).padding_idx(1)));
    register_module("lstm", nn::LSTM(nn::LSTMOptions(4, 5).num_layers(2)));
    register_module("conv", nn::Conv2d(3, 4, 3));
    register_module("layer", nn::TransformerEncoderLayer(8, 2));
    shared = register_parameter("shared", linear->weight);
  }
  void add_parameters(std::int64_t n) {
    weight = register_parameter("weight", torch::randn({n, 3}) * 0.02);
    nn::init::orthogonal_(register_parameter("orthogonal", torch::empty({n, n})));
    nn::init::sparse_(register_parameter("sparse", torch::empty({n, n})), 0.3);
    register_parameter("kaiming", nn::init::kaiming_normal_(torch::empty({n, n})));
    auto ones = register_parameter("ones", torch::ones({n}));
    const torch::NoGradGuard no_grad;
    ones[1] = 7;
    ones.mul_(torch::tensor({2.0f}).expand({n}));
    weight.data().add_(1);
    weight.t().select(0, 1).normal_();
    ones.index_put_({torch::arange(n).gt(2)}, 5.0);
    if (ones[1].item<float>() == 14.0f) ones[0] = -1;
    register_buffer("part", ones.narrow(0, 1, 2));
  }
  void add_buffers(std::int64_t n) {
    register_buffer("list", torch::tensor({{1, 2}, {3, 4}}));
    register_buffer("vector", torch::tensor(std::vector<float>{1, 2, 3}));
    register_buffer("order", torch::randperm(n));
    register_buffer("dropped", torch::dropout(torch::ones({n}), 0.5, true));
    register_buffer("positions", weight.detach().gt(1).nonzero());
    register_buffer("like", torch::zeros({2}, weight.options().requires_grad(false)));
    const auto base = 1.0 / torch::pow(10000.0, torch::arange(0, 8, 2, torch::kFloat) / 8);
    const auto angles = torch::outer(torch::arange(n, torch::kFloat), base);
    register_buffer("cosines", torch::cat({angles, angles}, -1).cos());
    register_buffer("rotations", torch::polar(torch::ones_like(angles), angles));
    register_buffer("drawn", torch::multinomial(torch::ones({n}), 3));
    const auto chunks = torch::randn({6, n}).chunk(3);
    register_buffer("chunk", chunks[1].clone());
    register_buffer("last_chunk", chunks[2]);
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    register_buffer("first", torch::empty({20}).normal_(0, 1, generator));
    register_buffer("second", torch::empty({20}).normal_(0, 1, generator));
    register_buffer("short", torch::randn({n, n}).to(torch::kBFloat16));
  }
};
TESSERA_MODULE(Zoo);

Zoo make_zoo() {
  torch::manual_seed(3);
  return Zoo(7);
}

TEST(DeferredInit, MakesWhatTheConstructorMakesAndLeavesTheGeneratorWhereItDoes) {
  auto expected = make_zoo();
  const auto next = torch::rand({3});
  auto zoo = deferred_init(make_zoo);
  EXPECT_TRUE(testing::equal(torch::rand({3}), next));
  EXPECT_TRUE(zoo->weight.is_meta());
  EXPECT_TRUE(is_deferred(zoo->weight));
  EXPECT_FALSE(is_deferred(expected->weight));
  const auto state = at::detail::getDefaultCPUGenerator().get_state();
  materialize(zoo);
  expect_same(states_of(*expected), states_of(*zoo));
  EXPECT_TRUE(testing::equal(at::detail::getDefaultCPUGenerator().get_state(), state));
  EXPECT_EQ(zoo->shared.unsafeGetTensorImpl(),
            zoo->named_children()["linear"]->named_parameters()["weight"].unsafeGetTensorImpl());
  EXPECT_TRUE(zoo->named_buffers()["part"].is_alias_of(zoo->named_parameters()["ones"]));
}

TEST(DeferredInit, TheOrderOfMaterialisingDoesNotMatterAndWhatSharesMemoryGoesOnSharing) {
  auto expected = make_zoo();
  auto zoo = deferred_init(make_zoo);
  auto children = zoo->children();
  for (auto child = children.rbegin(); child != children.rend(); ++child) materialize(**child);
  EXPECT_TRUE(is_deferred(zoo->weight));
  materialize(zoo);
  expect_same(states_of(*expected), states_of(*zoo));

  // Each of two modules has a view of one tensor, and gets its data on its own.
  auto halves = deferred_init([] {
    const auto whole = torch::randn({4});
    auto pair = nn::ModuleList(nn::Linear(1, 1), nn::Linear(1, 1));
    for (int i = 0; i < 2; ++i) pair[i]->register_buffer("half", whole.narrow(0, 2 * i, 2));
    return pair;
  });
  materialize(*halves[1]);
  materialize(*halves[0]);
  EXPECT_TRUE(halves[0]->buffers()[0].is_alias_of(halves[1]->buffers()[0]));
}

TEST(DeferredInit, DtypesAreThoseOfTheConstructor) {
  const auto make = [] {
    torch::manual_seed(1);
    nn::Linear linear(3, 2);
    linear->to(torch::kBFloat16);
    return linear;
  };
  auto linear = deferred_init(make);
  materialize(linear);
  expect_same(states_of(*make()), states_of(*linear));

  torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  auto wide = deferred_init([] { return nn::Linear(3, 2); });
  torch::set_default_dtype(caffe2::TypeMeta::Make<float>());
  materialize(wide);
  EXPECT_EQ(wide->weight.scalar_type(), torch::kDouble);
}

TEST(DeferredInit, RefusesWhatItCannotKeep) {
  auto linear = deferred_init([] { return nn::Linear(3, 2); });
  EXPECT_THROW(linear->weight.data_ptr<float>(), c10::Error);
  {
    const torch::NoGradGuard no_grad;
    linear->bias.fill_(1);
  }
  std::string what;
  EXPECT_EQ(failure_of([&] { materialize(linear); }, &what), ErrorCode::invalid_argument);
  EXPECT_THAT(what, HasSubstr("changed after deferred_init had returned"));
  EXPECT_TRUE(is_deferred(linear->weight)) << "nothing may have changed";

  const auto on_gpu = [] { return nn::Linear(torch::zeros({2}, torch::kCUDA).size(0), 2); };
  EXPECT_EQ(failure_of([&] { deferred_init(on_gpu); }), ErrorCode::unsupported);
  EXPECT_EQ(failure_of([&] {
              deferred_init([&] {
                linear->weight.mul(2);
                return linear;
              });
            }),
            ErrorCode::unsupported);

  const auto large = torch::ones({1 << 19});
  auto copy = deferred_init([&] {
    nn::Linear module(1, 1);
    module->register_buffer("copy", torch::zeros({1 << 19}).copy_(large));
    return module;
  });
  large.add_(1);
  EXPECT_EQ(failure_of([&] { materialize(copy); }), ErrorCode::invalid_argument);
  EXPECT_TRUE(torch::zeros({2}).is_cpu()) << "an exception inside ends it";
}

enum class Kind { rows, hybrid, flat, flat_original, replicated, data_parallel };
constexpr std::array kKinds{"FullyShard",   "Hybrid",    "Flat",
                            "FlatOriginal", "Replicate", "DataParallel"};

// Blocks from the last to the first where each call makes one unit.
void shard(Net& net, const Mesh& mesh, Kind kind) {
  const auto all = [&](const auto& apply) {
    for (auto block = net->blocks.rbegin(); block != net->blocks.rend(); ++block) apply(*block);
    apply(net);
  };
  switch (kind) {
    case Kind::rows:
      return all([&](auto& module) { fully_shard(module, mesh); });
    case Kind::hybrid: {
      const auto hybrid = mesh.split(mesh.size() / 2);
      return all([&](auto& module) { fully_shard(module, hybrid); });
    }
    case Kind::flat:
    case Kind::flat_original: {
      const FullyShardedDataParallel<Net> model(
          net, mesh,
          {.auto_wrap_policy = module_wrap_policy<BlockImpl>(),
           .use_orig_params = kind == Kind::flat_original});
      return;
    }
    case Kind::replicated:
      return all([&](auto& module) { replicate(module, mesh); });
    case Kind::data_parallel:
      const DistributedDataParallel<Net> model(net, mesh);
  }
}

using DeferredCase = std::tuple<Kind, bool>;
class DeferredTraining : public ::testing::TestWithParam<DeferredCase> {};

TEST_P(DeferredTraining, EqualsTrainingOfAnEagerModel_C9_L11) {
  const auto [kind, tied] = GetParam();
  run_mesh(4, [&](Mesh& mesh) {
    const auto train = [&](Net net) {
      shard(net, mesh, kind);
      const auto parameters = sharded_parameters(net);
      const auto untrained = full_state_dict(net);
      torch::optim::SGD optimizer(local_tensors(parameters), 0.1);
      auto generator = at::make_generator<at::CPUGeneratorImpl>(10 + mesh.rank());
      for (int step = 0; step < 2; ++step) {
        const auto tokens =
            torch::randint(0, testing::kVocabulary, {2, 4}, generator, torch::kInt64);
        optimizer.zero_grad();
        net(tokens).square().mean().backward();
        optimizer.step();
      }
      return std::pair(untrained, full_state_dict(net));
    };
    const auto plain = make_net({.tied = tied});
    const auto expected = train(make_net({.tied = tied}));
    auto net = deferred_init([&] { return make_net({.tied = tied}); });
    ASSERT_TRUE(is_deferred(net->embed->weight));
    const auto found = train(net);
    EXPECT_EQ(net->head->weight.unsafeGetTensorImpl() == net->embed->weight.unsafeGetTensorImpl(),
              tied);
    for (const auto& entry : plain->named_parameters()) {
      EXPECT_TRUE(testing::equal(found.first[entry.key()], entry.value())) << entry.key();
      EXPECT_TRUE(testing::equal(found.second[entry.key()], expected.second[entry.key()]))
          << entry.key();
      EXPECT_FALSE(testing::equal(found.second[entry.key()], entry.value())) << entry.key();
    }
  });
}

std::string place_name_of(const ::testing::TestParamInfo<DeferredCase>& info) {
  const auto [kind, tied] = info.param;
  return std::string(kKinds[static_cast<std::size_t>(kind)]) + (tied ? "Tied" : "");
}

INSTANTIATE_TEST_SUITE_P(All, DeferredTraining,
                         ::testing::Combine(::testing::Values(Kind::rows, Kind::hybrid, Kind::flat,
                                                              Kind::flat_original, Kind::replicated,
                                                              Kind::data_parallel),
                                            ::testing::Bool()),
                         place_name_of);

TEST(DeferredUnits, GetTheirDataOneAfterTheOther_L11) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = deferred_init([] { return make_net({}); });
    fully_shard(net->blocks[1], mesh);
    EXPECT_FALSE(net->blocks[1]->up->weight.is_meta());
    EXPECT_TRUE(is_deferred(net->blocks[0]->up->weight));
    EXPECT_TRUE(is_deferred(net->embed->weight));
  });
}

struct NormedImpl : nn::Module {
  nn::BatchNorm1d norm{nullptr};
  nn::Linear linear{nullptr};
  NormedImpl() {
    norm = register_module("norm", nn::BatchNorm1d(3));
    linear = register_module("linear", nn::Linear(3, 2));
    register_buffer("mask", torch::triu(torch::ones({3, 3}), 1));
  }
  torch::Tensor forward(const torch::Tensor& x) { return linear(norm(x)); }
};
TESSERA_MODULE(Normed);

TEST(DeferredUnits, TheirBuffersGetDataAndAreUpdated_L11) {
  run_mesh(2, [](Mesh& mesh) {
    const auto eager = Normed();
    auto module = deferred_init([] { return Normed(); });
    fully_shard(module, mesh);
    EXPECT_TRUE(testing::equal(module->named_buffers()["mask"], eager->named_buffers()["mask"]));
    EXPECT_TRUE(testing::equal(module->norm->running_var, torch::ones({3})));
    module(torch::full({2, 3}, 10.0)).sum().backward();
    EXPECT_TRUE(testing::allclose(module->norm->running_mean, torch::ones({3})));
    EXPECT_EQ(module->norm->num_batches_tracked.item<std::int64_t>(), 1);
  });
}

// Meta without any record, as another library may hand it over.
Normed on_meta() {
  auto module = deferred_init([] { return Normed(); });
  for (const auto& state : states_of(*module)) {
    const auto bare = torch::empty(state.value().sizes(), state.value().options());
    state.value().unsafeGetTensorImpl()->shallow_copy_from(bare.getIntrusivePtr());
  }
  return module;
}

TEST(DeferredUnits, WithoutRecordTheyAreRefused_X11_R2) {
  run_mesh(2, [](Mesh& mesh) {
    const auto refused = [&](const auto& act) {
      std::string what;
      auto module = on_meta();
      EXPECT_EQ(failure_of([&] { act(module); }, &what), ErrorCode::invalid_argument);
      EXPECT_THAT(what, HasSubstr("Unable to call `reset_parameters()` for module on meta device"));
      EXPECT_THAT(what, HasSubstr("FSDP parameters should be materialized from meta device before "
                                  "training"));
      EXPECT_THAT(what, HasSubstr("'mask'"));
    };
    refused([&](auto& module) { fully_shard(module, mesh); });
    refused([&](auto& module) { replicate(module, mesh); });
    refused([&](auto& module) { FullyShardedDataParallel<Normed>(module, mesh); });
    refused([&](auto& module) { DistributedDataParallel<Normed>(module, mesh); });
    refused([&](auto& module) { materialize(module); });
  });
}

TEST(DeferredUnits, AFailureOfOneRankReachesTheOthersAtOnce) {
  std::array<std::optional<ErrorCode>, 3> codes;
  run_mesh(3, [&](Mesh& mesh) {
    auto module = deferred_init([] { return Normed(); });
    ShardOptions options;
    options.param_init_fn = [&](nn::Module&) {
      if (mesh.rank() == 1) throw Error(ErrorCode::limit, "no room");
    };
    codes[mesh.rank()] = failure_of([&] { fully_shard(module, mesh, options); });
  });
  EXPECT_THAT(codes, ElementsAre(ErrorCode::peer_failed, ErrorCode::limit, ErrorCode::peer_failed));
}

// Fills with 1, 2, ... in the order of calls, and notes which modules it was called with.
struct Filler {
  std::vector<const nn::Module*> called = {};
  std::function<void(nn::Module&)> function() {
    return [this](nn::Module& module) {
      called.push_back(&module);
      for (const auto& tensor : module.parameters(false)) {
        EXPECT_FALSE(tensor.is_meta());
        tensor.fill_(static_cast<double>(called.size()));
      }
      for (const auto& tensor : module.buffers(false)) tensor.zero_();
    };
  }
};

TEST(ParamInitFn, FillsTheModulesOfAUnitFromTheOutermostOn_C9_L11) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = deferred_init([] { return make_net({}); });
    auto* ignored = net->blocks[2].get();
    fully_shard(net->blocks[0], mesh);
    Filler filler;
    ShardOptions options;
    options.param_init_fn = filler.function();
    options.ignored_parameters = ignored->parameters();
    fully_shard(net, mesh, options);
    const auto& block = net->blocks[1];
    EXPECT_THAT(filler.called, ElementsAre(net->embed.get(), net->head.get(), block->norm.get(),
                                           block->up.get(), block->down.get()));
    const auto state = full_state_dict(net->blocks[0]);
    EXPECT_TRUE(testing::equal(state["up.weight"], make_net({})->blocks[0]->up->weight));
    unshard(net);
    EXPECT_TRUE(testing::equal(net->head->weight, torch::full({11, 7}, 2.0)));
    EXPECT_TRUE(testing::equal(block->down->bias, torch::full({7}, 5.0)));
    reshard(net);
    EXPECT_TRUE(is_deferred(ignored->up->weight)) << "ignored parameters stay as they are";
    materialize(net);
    EXPECT_TRUE(testing::equal(ignored->up->weight, make_net({})->blocks[2]->up->weight));
  });
}

TEST(ParamInitFn, OfFullyShardedDataParallelSkipsIgnoredModules_C9) {
  run_mesh(2, [](Mesh& mesh) {
    for (const bool recorded : {true, false}) {
      auto module = recorded ? deferred_init([] { return Normed(); }) : on_meta();
      Filler filler;
      const FullyShardedDataParallel<Normed> model(
          module, mesh,
          {.ignored_modules = {module->norm.ptr()}, .param_init_fn = filler.function()});
      EXPECT_THAT(filler.called, ElementsAre(module.get(), module->linear.get()));
      EXPECT_TRUE(module->norm->weight.is_meta());
      EXPECT_TRUE(module->norm->running_mean.is_meta());
      EXPECT_TRUE(testing::equal(module->named_buffers()["mask"], torch::zeros({3, 3})));
      EXPECT_TRUE(testing::equal(full_state_dict(module)["linear.bias"], torch::full({2}, 2.0)));
    }
  });
}

TEST(SyncModuleStates, NeedsData_C11) {
  run_mesh(2, [](Mesh& mesh) {
    std::string what;
    auto module = deferred_init([] { return Normed(); });
    EXPECT_EQ(failure_of([&] { sync_module_states(module, mesh); }, &what),
              ErrorCode::invalid_argument);
    EXPECT_THAT(what, HasSubstr("materialize()"));
  });
}

TEST(SyncModuleStates, OfFullyShardedDataParallelGoesUnitByUnit_C11_HY6) {
  run_mesh(4, [](Mesh& mesh) {
    const auto expected = make_net({});
    const auto make = [&] {
      if (mesh.rank() == 0) return make_net({});  // the only one with values
      return deferred_init([] { return make_net({}); });
    };
    FullyShardedOptions options{.auto_wrap_policy = module_wrap_policy<BlockImpl>(),
                                .param_init_fn = Filler().function(),
                                .sync_module_states = true};
    Filler filler;
    options.param_init_fn = filler.function();
    const auto check = [&](const Net& net) {
      const auto state = full_state_dict(net);
      for (const auto& entry : expected->named_parameters())
        EXPECT_TRUE(testing::equal(state[entry.key()], entry.value())) << entry.key();
    };
    const FullyShardedDataParallel<Net> model(make(), mesh, options);
    check(model.module());
    options.sharding_strategy = ShardingStrategy::hybrid_shard;
    const FullyShardedDataParallel<Net> hybrid(make(), mesh.split(2), options);
    check(hybrid.module());
  });
}

}  // namespace
}  // namespace tessera
