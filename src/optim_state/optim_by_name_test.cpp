#include "optim_state/optim_by_name.h"

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/temporary_directory.h"
#include "optim_state/by_name_testing.h"
#include "tessera/checkpoint.h"
#include "tessera/pytorch/distributed_state_dict.h"
#include "tessera/stateful.h"
#include "torch/testing.h"

namespace tessera {

// The states of models and optimizers by name, with options (checkpoint-rows P-29, P-30).

namespace {

using testing::all_of;
using testing::copies_of;
using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_equal;
using testing::expect_same;
using testing::fresh_run;
using testing::half_net;
using ::testing::HasSubstr;
using testing::having;
using testing::kWays;
using testing::make_net;
using testing::Net;
using testing::refusal;
using testing::run_mesh;
using testing::run_on;
using testing::shard;
using testing::train;
using testing::trained_run;
using testing::Training;
using testing::Way;
using testing::with_sorted_groups;
using Options = DistributedStateDictOptions;

class StatesByName : public ::testing::TestWithParam<std::tuple<Way, int>> {
 protected:
  static void on_ranks(const std::function<void(Way way, Mesh& mesh)>& body) {
    const auto [way, world] = GetParam();
    run_mesh(world, [&, way = way](Mesh& mesh) { body(way, mesh); });
  }
};

TEST_P(StatesByName, AreThoseOfTheUnshardedTraining_P30) {
  auto plain = trained_run(Way::whole, Mesh());
  const auto expected = all_of(plain);
  on_ranks([&](Way way, Mesh& mesh) {
    auto run = trained_run(way, mesh);
    const auto whole = all_of(run);
    expect_same(whole, expected, 1e-5);
    const auto [model, optim] = get_state_dict(run.net, *run.optimizer);
    expect_same(gather_state_dict(model, mesh), whole.at("model"));
    expect_same(with_sorted_groups(gather_state_dict(optim, mesh)), whole.at("optim"));
  });
}

// In both kinds, with both kinds of keys.
TEST_P(StatesByName, AreWhatIsSet_P30) {
  on_ranks([&](Way way, Mesh& mesh) {
    auto run = trained_run(way, mesh);
    for (const bool full : {false, true}) {
      for (const bool flat : {false, true}) {
        const Options options{.full_state_dict = full, .flatten_optimizer_state_dict = flat};
        const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
        auto into = fresh_run(way, mesh);
        const auto keys = set_state_dict(into.net, *into.optimizer, model, optim, options);
        EXPECT_TRUE(keys.missing_keys.empty() && keys.unexpected_keys.empty());
        run.optimizer->zero_grad();
        expect_equal(into, run);
      }
    }
    auto into = fresh_run(way, mesh);
    const auto [model, optim] = get_state_dict(run.net, *run.optimizer);
    set_state_dict(into.net, *into.optimizer, model, optim);
    EXPECT_EQ(train(into.net, *into.optimizer, 3, 3), train(run.net, *run.optimizer, 3, 3));
  });
}

// cpu_offload: rank 0 alone gets the state. broadcast_from_rank0: it alone has one.
TEST_P(StatesByName, AreRankZerosForAll_P30) {
  on_ranks([&](Way way, Mesh& mesh) {
    auto run = trained_run(way, mesh);
    Options options{.full_state_dict = true, .cpu_offload = true, .group = mesh};
    const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
    EXPECT_EQ(model.size() > 0, mesh.rank() == 0);
    EXPECT_EQ(optim.size() > 0, mesh.rank() == 0);
    for (const bool offload : {false, true}) {
      options.cpu_offload = offload;
      options.broadcast_from_rank0 = !offload;
      auto into = fresh_run(way, mesh);
      set_state_dict(into.net, *into.optimizer, model, optim, options);
      run.optimizer->zero_grad();
      expect_equal(into, run);
      auto again = fresh_run(way, mesh);
      set_model_state_dict(again.net, model, options);
      set_optimizer_state_dict(again.net, *again.optimizer, optim, options);
      expect_equal(again, run);
    }
  });
}

// Memory to load into is there before the first step, and the optimizer stays as it is.
TEST_P(StatesByName, OfAFreshOptimizerAreZeros_P30) {
  on_ranks([&](Way way, Mesh& mesh) {
    auto fresh = run_on(make_net({}), way, mesh);
    const auto before = copies_of(fresh);
    const auto state = get_optimizer_state_dict(fresh.net, *fresh.optimizer);
    auto run = trained_run(way, mesh);
    const auto expected = get_optimizer_state_dict(run.net, *run.optimizer);
    EXPECT_EQ(state.at("state").size(), expected.at("state").size());
    for (const auto& [name, entries] : expected.at("state").pairs()) {
      const auto& own = state.at("state").at(name.as_string());
      EXPECT_EQ(testing::keys(own), testing::keys(entries));
      for (const auto& [entry, value] : own.pairs()) {
        const auto whole = gather_state_dict(Value::dict({{"it", value}}), mesh).at("it");
        EXPECT_EQ(tensor_of(whole.as_tensor()).count_nonzero().item<int>(), 0);
      }
    }
    const auto after = copies_of(fresh);
    for (std::size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(torch::equal(before[i], after[i]));
    auto untouched = run_on(make_net({}), way, mesh);
    EXPECT_EQ(train(fresh.net, *fresh.optimizer, 0, 2),
              train(untouched.net, *untouched.optimizer, 0, 2));
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, StatesByName,
                         ::testing::Combine(::testing::ValuesIn(kWays), ::testing::Values(1, 2, 3)),
                         [](const auto& of) {
                           return testing::name_of(std::get<0>(of.param)) +
                                  std::to_string(std::get<1>(of.param));
                         });

// get, load, set: as Python programs do it, on other ranks and with another way of sharding.
TEST(DistributedStateDict, GoesThroughCheckpoints_P30) {
  for (const bool flat : {false, true}) {
    const Options options{.flatten_optimizer_state_dict = flat};
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    double expected = 0;
    run_mesh(3, [&](Mesh& mesh) {
      auto run = trained_run(Way::original, mesh);
      const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
      save(Value::dict({{"model", model}, {"optim", optim}}), path, mesh.checkpoint_group());
      const auto last = train(run.net, *run.optimizer, 3, 2);
      if (mesh.rank() == 0) expected = last;
    });
    for (const auto way : kWays) {
      run_mesh(2, [&](Mesh& mesh) {
        auto into = fresh_run(way, mesh);
        const auto [model, optim] = get_state_dict(into.net, *into.optimizer, options);
        auto tree = Value::dict({{"model", model}, {"optim", optim}});
        const auto report = load(tree, path, mesh.checkpoint_group());
        EXPECT_TRUE(report.extra.empty());
        set_state_dict(into.net, *into.optimizer, tree.at("model"), tree.at("optim"), options);
        EXPECT_NEAR(train(into.net, *into.optimizer, 3, 2), expected, 1e-5);
      });
    }
  }
}

// The state by its key alone is one that every way of sharding takes.
TEST(DistributedStateDict, TakesAStateThatWasLoadedByItsKey_P29) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto alone = solo_group();
  auto plain = trained_run(Way::whole, Mesh());
  const auto [model, optim] = get_state_dict(plain.net, *plain.optimizer);
  save(Value::dict({{"model", model}, {"optim", optim}}), path, *alone);
  const auto expected = with_sorted_groups(optim);
  for (const auto way : kWays) {
    for (const int world : {1, 2, 3}) {
      run_mesh(world, [&](Mesh& mesh) {
        auto into = fresh_run(way, mesh);
        const auto loaded =
            load_sharded_optimizer_state_dict("optim", path, mesh.checkpoint_group());
        set_optimizer_state_dict(into.net, *into.optimizer, loaded.at("optim"), {.group = mesh});
        expect_same(all_of(into).at("optim"), expected);
      });
    }
  }
}

// A frozen block: FSDP1's flat parameter is frozen as a whole.
Net partly_frozen() {
  auto net = make_net({.blocks = 2});
  for (auto& parameter : net->blocks[0]->parameters()) parameter.set_requires_grad(false);
  return net;
}

TEST(DistributedStateDict, LeavesFrozenParametersOut_P30) {
  for (const auto way : {Way::whole, Way::replicated, Way::rows, Way::flat, Way::original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto run = run_on(partly_frozen(), way, mesh);
      train(run.net, *run.optimizer, 0, 2);
      for (const bool full : {false, true}) {
        Options options{.full_state_dict = full, .ignore_frozen_params = true};
        const auto states = get_state_dict(run.net, *run.optimizer, options);
        const auto &model = states.first, &optim = states.second;
        EXPECT_EQ(model.find("block0.up.weight"), nullptr);
        EXPECT_EQ(model.size(), 8u);
        // They are in their group, and have no state.
        EXPECT_EQ(optim.at("state").size(), 8u);
        EXPECT_EQ(optim.at("param_groups").at(0).at("params").size(), 14u);
        auto into = run_on(partly_frozen(), way, mesh);
        options.ignore_frozen_params = false;
        EXPECT_THAT(
            refusal(into,
                    [&] { set_state_dict(into.net, *into.optimizer, model, optim, options); }),
            HasSubstr("lacks block0.norm.weight, block0.norm.bias"));
        options.strict = false;
        const auto keys = set_state_dict(into.net, *into.optimizer, model, optim, options);
        EXPECT_EQ(keys.missing_keys.size(), 6u);
        run.optimizer->zero_grad();
        expect_equal(into, run);
      }
    });
  }
}

TEST(DistributedStateDict, OfSubmodules_P30) {
  run_mesh(2, [](Mesh& mesh) {
    auto run = trained_run(Way::rows, mesh);
    Options options{.full_state_dict = true};
    options.submodules = {run.net->blocks[1]->norm.ptr(), run.net->head.ptr()};
    EXPECT_THAT(testing::keys(get_model_state_dict(run.net, options)),
                ElementsAre("block1.norm.weight", "block1.norm.bias", "head.weight"));
    options.keep_submodule_prefixes = false;
    EXPECT_THAT(error_of([&] { (void)get_model_state_dict(run.net, options); }),
                HasSubstr("conflict: two of `submodules` have this name"));
    options.submodules.pop_back();
    EXPECT_THAT(testing::keys(get_model_state_dict(run.net, options)),
                ElementsAre("weight", "bias"));
    options.submodules = {make_net({})->head.ptr()};
    EXPECT_THAT(error_of([&] { (void)get_model_state_dict(run.net, options); }),
                HasSubstr("invalid_argument: one of `submodules` is not below the model"));
  });
}

// Two copies of two parts each: rank 0 of all is the one that counts.
TEST(DistributedStateDict, OfHybridShards_P30) {
  for (const bool is_fsdp1 : {false, true}) {
    run_mesh(4, [&](Mesh& mesh) {
      const auto hybrid = mesh.split(2);
      const auto make = [&](Net net) {
        if (is_fsdp1) {
          FullyShardedDataParallel<Net>(net, hybrid,
                                        {.sharding_strategy = ShardingStrategy::hybrid_shard});
        } else {
          fully_shard(net, hybrid);
        }
        auto optimizer = testing::make_optimizer(net);
        return Training{net, std::move(optimizer)};
      };
      auto run = make(make_net({}));
      train(run.net, *run.optimizer, 0, 2);
      const Options offloaded{.full_state_dict = true, .cpu_offload = true};
      for (const auto& options : {Options{}, offloaded}) {
        const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
        EXPECT_EQ(model.size() > 0, mesh.rank() == 0 || !options.cpu_offload);
        EXPECT_EQ(optim.size() > 0, mesh.rank() == 0 || !options.cpu_offload);
        auto into = make(half_net());
        set_state_dict(into.net, *into.optimizer, model, optim, options);
        run.optimizer->zero_grad();
        expect_equal(into, run);
      }
    });
  }
}

// Under both names in the model, once in the optimizer; and found there by either.
TEST(DistributedStateDict, SharedParametersAreHandledOnce_P30) {
  for (const auto way : {Way::whole, Way::rows, Way::flat, Way::original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto run = run_on(make_net({.tied = true}), way, mesh);
      train(run.net, *run.optimizer, 0, 2);
      run.optimizer->zero_grad();
      for (const bool flat : {false, true}) {
        const Options options{.full_state_dict = true, .flatten_optimizer_state_dict = flat};
        const auto [model, optim] = get_state_dict(run.net, *run.optimizer, options);
        EXPECT_TRUE(model.find("embed.weight") != nullptr && model.find("head.weight") != nullptr);
        // As PyTorch gives it for a model whose head has the weight first.
        const auto renamed = [](const std::string& name) {
          const auto at = name.find("embed.weight");
          return at == std::string::npos ? name : std::string(name).replace(at, 12, "head.weight");
        };
        std::vector<Value::Pair> pairs;
        const auto& states = flat ? optim : optim.at("state");
        for (const auto& [key, value] : states.pairs()) {
          EXPECT_EQ(key.as_string().find("head.weight"), std::string::npos);
          pairs.emplace_back(renamed(key.as_string()), value);
        }
        auto by_other_name = Value::dict(std::move(pairs));
        if (!flat) by_other_name = having(optim, "state", by_other_name);
        for (const auto& given : {optim, by_other_name}) {
          auto into = run_on(half_net(true), way, mesh);
          set_state_dict(into.net, *into.optimizer, model, given, options);
          expect_equal(into, run);
        }
      }
    });
  }
}

// Two optimizers, of which one has no states.
struct TwoOptimizers {
  explicit TwoOptimizers(Net& net, double lr = 0.01) {
    const auto parameters = sharded_parameters(net);
    const std::size_t half = parameters.size() / 2;
    sgd = std::make_unique<torch::optim::SGD>(
        local_tensors({parameters.begin(), parameters.begin() + half}), lr);
    adam = std::make_unique<AdamW>(
        std::vector<ShardedParameter>{parameters.begin() + half, parameters.end()},
        AdamWOptions{.lr = lr});
  }
  void train(Net& net) const {
    sgd->zero_grad();
    adam->zero_grad();
    testing::loss_of(net, testing::batch(0, 0, 1)).backward();
    sgd->step();
    adam->step();
  }
  [[nodiscard]] OptimizerRefs refs() const { return {*adam, *sgd}; }

  std::unique_ptr<torch::optim::SGD> sgd;
  std::unique_ptr<AdamW> adam;
};

TEST(DistributedStateDict, OfSeveralOptimizers_P30) {
  for (const auto way : {Way::whole, Way::rows, Way::original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, way, mesh);
      const TwoOptimizers pair(net);
      pair.train(net);
      for (const bool flat : {false, true}) {
        const Options options{.flatten_optimizer_state_dict = flat};
        const auto state = get_optimizer_state_dict(net, pair.refs(), options);
        if (!flat) {
          EXPECT_EQ(state.at("param_groups").size(), 2u);
          EXPECT_EQ(state.at("state").size(), pair.adam->parameters().size());
        }
        const TwoOptimizers into(net, 0.5);
        set_optimizer_state_dict(net, into.refs(), state, options);
        EXPECT_EQ(into.sgd->param_groups()[0].options().get_lr(), 0.01);
        EXPECT_EQ(into.adam->options().lr, 0.01);
        expect_same(gather_state_dict(get_optimizer_state_dict(net, into.refs(), options), mesh),
                    gather_state_dict(state, mesh));
      }
      EXPECT_THAT(error_of([&] {
                    (void)get_optimizer_state_dict(net, {*pair.adam, *pair.adam});
                  }),
                  HasSubstr("conflict: two optimizers have this parameter"));
    });
  }
}

TEST(DistributedStateDict, OfSgdWithoutStatesIsItsGroups_P30) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    shard(net, Way::rows, mesh);
    torch::optim::SGD sgd(local_tensors(sharded_parameters(net)), 0.01);
    train(net, sgd, 0, 1);
    for (const bool flat : {false, true}) {
      const Options options{.flatten_optimizer_state_dict = flat};
      const auto state = get_optimizer_state_dict(net, sgd, options);
      torch::optim::SGD into(local_tensors(sharded_parameters(net)), 0.5);
      set_optimizer_state_dict(net, into, state, options);
      EXPECT_EQ(into.param_groups()[0].options().get_lr(), 0.01);
      EXPECT_TRUE(into.state().empty());
    }
  });
}

struct HalfUsedImpl : torch::nn::Module {
  torch::Tensor weight, unused;
  HalfUsedImpl() {
    weight = register_parameter("weight", torch::ones({2}));
    unused = register_parameter("unused", torch::ones({10}));
  }
  torch::Tensor forward(const torch::Tensor& x) { return x * weight; }
};
TESSERA_MODULE(HalfUsed);

// Two of three ranks have no state at all, and yet this optimizer has made a step.
TEST(DistributedStateDict, IsFreshOnlyIfItIsOnAllRanks_P30) {
  run_mesh(3, [](Mesh& mesh) {
    HalfUsed net;
    const FullyShardedDataParallel<HalfUsed> model(net, mesh, {.use_orig_params = true});
    torch::optim::Adam adam(local_tensors(model.parameters()), 0.1);
    net(torch::ones({2})).sum().backward();
    adam.step();
    const auto state = get_optimizer_state_dict(net, adam, {.full_state_dict = true});
    EXPECT_THAT(testing::keys(state.at("state")), ElementsAre("weight"));
  });
}

struct AlikeImpl : torch::nn::Module {
  torch::nn::Linear inner{nullptr};
  AlikeImpl() {
    inner = register_module("a", torch::nn::Linear(2, 2));
    register_parameter("a", torch::ones({3}));
  }
};

// Flat keys of "a" begin as those of "a.weight" do.
TEST(DistributedStateDict, FlatKeysAreOfTheLongestName_P30) {
  const auto net = std::make_shared<AlikeImpl>();
  const Options flat{.flatten_optimizer_state_dict = true};
  torch::optim::Adam adam(net->parameters(), 0.1), into(net->parameters(), 0.5);
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = torch::ones_like(parameter);
  adam.step();
  const auto state = get_optimizer_state_dict(net, adam, flat);
  EXPECT_NE(state.find("state.a.weight.exp_avg"), nullptr);
  EXPECT_NE(state.find("state.a.exp_avg"), nullptr);
  set_optimizer_state_dict(net, into, state, flat);
  expect_same(get_optimizer_state_dict(net, into), get_optimizer_state_dict(net, adam));
}

// Before its first step each optimizer says what it is going to have, if it can.
TEST(DistributedStateDict, FreshOptimizersSayWhatTheyWillHave_P30) {
  auto net = make_net({});
  const auto tensors = local_tensors(sharded_parameters(net));
  const auto entries = [&](torch::optim::Optimizer& optimizer) {
    const auto state = get_optimizer_state_dict(net, optimizer).at("state");
    return state.size() == 0 ? std::vector<std::string>() : testing::keys(state.pairs()[0].second);
  };
  torch::optim::SGD momentum(tensors, torch::optim::SGDOptions(0.1).momentum(0.9));
  EXPECT_THAT(entries(momentum), ElementsAre("momentum_buffer"));
  torch::optim::RMSprop prop(tensors, torch::optim::RMSpropOptions(0.1).centered(true));
  EXPECT_THAT(entries(prop), ElementsAre("step", "grad_avg", "square_avg"));
  torch::optim::Adagrad adagrad(tensors, 0.1);
  EXPECT_THAT(entries(adagrad), ElementsAre("step", "sum"));
  torch::optim::LBFGS history(tensors, 0.1);
  EXPECT_THAT(entries(history), ElementsAre());
  AdamW own(sharded_parameters(net));
  const auto state = get_optimizer_state_dict(net, own).at("state").at("head.weight");
  EXPECT_EQ(testing::keys(state).size(), 3u);
  EXPECT_FALSE(own.state(0, 0).defined());
}

// Each group has every second parameter, and a learning rate of its own.
std::unique_ptr<torch::optim::Adam> in_groups(Net& net, std::vector<double> rates) {
  const auto parameters = local_tensors(sharded_parameters(net));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (std::size_t g = 0; g < rates.size(); ++g) {
    std::vector<at::Tensor> part;
    for (std::size_t p = g; p < parameters.size(); p += rates.size()) part.push_back(parameters[p]);
    groups.emplace_back(part, std::make_unique<torch::optim::AdamOptions>(rates[g]));
  }
  return std::make_unique<torch::optim::Adam>(groups, torch::optim::AdamOptions(0.9));
}

TEST(DistributedStateDict, GroupsAreFoundByTheirParameters_P30) {
  for (const auto way : {Way::rows, Way::original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, way, mesh);
      Training run{net, in_groups(net, {0.01, 0.02, 0.03})};
      train(net, *run.optimizer, 0, 2);
      for (const bool flat : {false, true}) {
        const Options options{.full_state_dict = true, .flatten_optimizer_state_dict = flat};
        const auto state = get_optimizer_state_dict(net, *run.optimizer, options);
        Training into{net, in_groups(net, {0.1, 0.2, 0.3})};
        std::ranges::reverse(into.optimizer->param_groups());
        set_optimizer_state_dict(net, *into.optimizer, state, options);
        EXPECT_EQ(into.optimizer->param_groups()[0].options().get_lr(), 0.03);
        EXPECT_EQ(into.optimizer->param_groups()[2].options().get_lr(), 0.01);
        EXPECT_EQ(train(net, *into.optimizer, 2, 1) > 0, true);
        // Parameters of one group are to have the same options.
        Training one{net, in_groups(net, {0.5})};
        EXPECT_THAT(
            refusal(one, [&] { set_optimizer_state_dict(net, *one.optimizer, state, options); }),
            HasSubstr("mismatch"));
      }
    });
  }
}

TEST(DistributedStateDict, AGroupWithoutParametersIsTheOneThatIsEmpty_P30) {
  auto net = make_net({});
  const auto make = [&](double rate) {
    Training run{net, in_groups(net, {rate})};
    run.optimizer->add_param_group(torch::optim::OptimizerParamGroup(
        std::vector<at::Tensor>(), std::make_unique<torch::optim::AdamOptions>(rate / 2)));
    return run;
  };
  auto run = make(0.1), into = make(0.4);
  const auto state = get_optimizer_state_dict(net, *run.optimizer);
  set_optimizer_state_dict(net, *into.optimizer, state);
  EXPECT_EQ(into.optimizer->param_groups()[1].options().get_lr(), 0.05);
  Training one{net, in_groups(net, {0.5})};
  const auto of_one = get_optimizer_state_dict(net, *one.optimizer);
  EXPECT_THAT(refusal(into, [&] { set_optimizer_state_dict(net, *into.optimizer, of_one); }),
              HasSubstr("the state has 0 such groups instead of one"));
}

// Buffers of all dtypes travel with the parameters.
TEST(DistributedStateDict, HasBuffers_P30) {
  run_mesh(2, [](Mesh& mesh) {
    torch::nn::Sequential from(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    torch::nn::Sequential to(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
    from->forward(torch::ones({4, 2}));
    fully_shard(to, mesh);
    const auto state = get_model_state_dict(from, {.full_state_dict = true});
    const bool is_first = mesh.rank() == 0;
    set_model_state_dict(to, is_first ? state : Value::dict(),
                         {.full_state_dict = true, .broadcast_from_rank0 = true});
    const auto now = get_model_state_dict(to, {.full_state_dict = true});
    EXPECT_EQ(tensor_of(now.at("1.num_batches_tracked").as_tensor()).item<int>(), 1);
    if (is_first) expect_same(now, state);
  });
}

}  // namespace
}  // namespace tessera
