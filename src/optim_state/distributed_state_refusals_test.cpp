// States by name that cannot be set (checkpoint-rows P-30).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "optim_state/by_name_testing.h"
#include "tessera/pytorch/distributed_state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::all_of;
using ::testing::ElementsAre;
using testing::error_of;
using testing::expect_same;
using testing::fresh_run;
using ::testing::HasSubstr;
using testing::having;
using testing::kWays;
using testing::lacking;
using testing::make_net;
using testing::refusal;
using testing::run_mesh;
using testing::trained_run;
using testing::Way;
using Options = DistributedStateDictOptions;

// What cannot be set says why on all ranks, and nothing is changed.
class RefusedStates : public ::testing::TestWithParam<Way> {
 protected:
  // `change` makes of the states what is set on one rank, the last, or on all.
  struct States {
    Value model, optim;
  };
  using Change = std::function<void(States&)>;
  static void expect_error(const Change& change, const std::string& text, const Options& of_all) {
    for (const bool on_all : {true, false}) {
      run_mesh(2, [&](Mesh& mesh) {
        auto run = trained_run(GetParam(), mesh, 1);
        auto options = of_all;
        options.group = mesh;
        auto get_options = options;
        get_options.broadcast_from_rank0 = false;
        get_options.cpu_offload = false;
        auto [model, optim] = get_state_dict(run.net, *run.optimizer, get_options);
        States states{model, optim};
        const int last = options.broadcast_from_rank0 ? 0 : 1;
        if (on_all || mesh.rank() == last) change(states);
        auto into = fresh_run(GetParam(), mesh);
        EXPECT_THAT(refusal(into,
                            [&] {
                              set_state_dict(into.net, *into.optimizer, states.model, states.optim,
                                             options);
                            }),
                    HasSubstr(text));
      });
    }
  }
};

TEST_P(RefusedStates, SayWhatIsWrong_P30) {
  const Options kinds[] = {
      {}, {.full_state_dict = true}, {.full_state_dict = true, .broadcast_from_rank0 = true}};
  for (const auto& options : kinds) {
    expect_error([](States& s) { s.model = lacking(s.model, "head.weight"); },
                 "mismatch: the state lacks head.weight", options);
    expect_error([](States& s) { s.model = having(s.model, "more", s.model.at("head.weight")); },
                 "the model lacks more", options);
    expect_error(
        [](States& s) { s.model = having(s.model, "head.weight", s.model.at("block0.up.weight")); },
        "the module [11, 7]", options);
    expect_error([](States& s) { s.model = having(s.model, "head.weight", 3); },
                 "the state has no tensor here", options);
    expect_error([](States& s) { s.model = having(s.model, "block0._flat_param", 3); },
                 "invalid_argument: a flat parameter", options);
    expect_error([](States& s) { s.optim = Value::dict(); },
                 "invalid_argument: the state of the optimizers is empty", options);
  }
}

TEST_P(RefusedStates, OfOptimizersSayWhatIsWrong_P30) {
  const auto with_state = [](const States& s, Value state) {
    return having(s.optim, "state", std::move(state));
  };
  for (const bool from_first : {false, true}) {
    const Options options{.full_state_dict = from_first, .broadcast_from_rank0 = from_first};
    expect_error(
        [&](States& s) {
          s.optim = with_state(s, lacking(s.optim.at("state"), "block1.up.weight"));
        },
        "Missing optimizer state for parameters that require gradients: block1.up.weight", options);
    expect_error(
        [&](States& s) {
          s.optim = with_state(s, Value::dict({{7, Value::dict()}}));
        },
        "dicts by the parameters' names", options);
    expect_error([](States& s) { s.optim = lacking(s.optim, "param_groups"); },
                 "invalid_argument: the state of an optimizer has no such part", options);
    expect_error(
        [](States& s) {
          const auto group = having(s.optim.at("param_groups").at(0), "params", Value::list());
          s.optim = having(s.optim, "param_groups", Value::list({group}));
        },
        "no group of the state has a parameter of this group", options);
    expect_error(
        [](States& s) {
          const auto& group = s.optim.at("param_groups").at(0);
          s.optim = having(s.optim, "param_groups", Value::list({group, group}));
          s.optim.at("param_groups").at(1) = having(group, "lr", 7);
        },
        "two groups of the state have this parameter", options);
    expect_error(
        [](States& s) {
          const auto group = having(s.optim.at("param_groups").at(0), "maximize", true);
          s.optim = having(s.optim, "param_groups", Value::list({group}));
        },
        "unsupported", options);
    auto flat = options;
    flat.flatten_optimizer_state_dict = true;
    expect_error(
        [](States& s) { s.optim = having(s.optim, "param_groups.block1.up.weight.lr", 0.125); },
        "All the parameters in the same parameter group should have the same saved", flat);
    expect_error(
        [](States& s) {
          s.optim = Value::dict({{"state.no", 1}});
        },
        "the state has no options for", flat);
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, RefusedStates,
                         ::testing::Values(Way::whole, Way::replicated, Way::rows, Way::flat,
                                           Way::original, Way::aligned),
                         [](const auto& of) { return testing::name_of(of.param); });

TEST(DistributedStateDict, WhatIsNotStrictIsReported_P30) {
  for (const auto way : kWays) {
    for (const bool from_first : {false, true}) {
      run_mesh(2, [&](Mesh& mesh) {
        auto run = trained_run(way, mesh);
        const Options options{.full_state_dict = from_first,
                              .strict = false,
                              .broadcast_from_rank0 = from_first,
                              .group = mesh};
        auto [model, optim] =
            get_state_dict(run.net, *run.optimizer, {.full_state_dict = from_first, .group = mesh});
        const auto part = having(lacking(model, "block1.up.weight"), "more", 1);
        const auto states = lacking(optim.at("state"), "block1.up.weight");
        auto into = fresh_run(way, mesh);
        const auto keys =
            set_state_dict(into.net, *into.optimizer, part,
                           way == Way::flat ? optim : having(optim, "state", states), options);
        EXPECT_THAT(keys.missing_keys, ElementsAre("block1.up.weight"));
        EXPECT_THAT(keys.unexpected_keys, ElementsAre("more"));
        const auto now = all_of(into), expected = all_of(run);
        EXPECT_TRUE((tensor_of(now.at("model").at("block1.up.weight").as_tensor()) == 0.5)
                        .all()
                        .item<bool>());
        expect_same(lacking(now.at("model"), "block1.up.weight"),
                    lacking(expected.at("model"), "block1.up.weight"));
        EXPECT_EQ(now.at("optim").at("state").find("block1.up.weight") == nullptr,
                  way != Way::flat);
      });
    }
  }
}

TEST(DistributedStateDict, ContradictionsAreRefused_P30) {
  run_mesh(2, [](Mesh& mesh) {
    auto run = trained_run(Way::rows, mesh);
    const auto states = get_state_dict(run.net, *run.optimizer);
    const auto &model = states.first, &optim = states.second;
    const Options options{.broadcast_from_rank0 = true};
    const std::string text =
        "invalid_argument: full_state_dict must be true when broadcast_from_rank0 is true";
    EXPECT_THAT(error_of([&] { (void)get_model_state_dict(run.net, options); }), HasSubstr(text));
    EXPECT_THAT(
        refusal(run, [&] { set_optimizer_state_dict(run.net, *run.optimizer, optim, options); }),
        HasSubstr(text));
    EXPECT_THAT(refusal(run, [&] { set_model_state_dict(run.net, Value::dict()); }),
                HasSubstr("invalid_argument: the state of the model is empty"));
    EXPECT_TRUE(
        set_model_state_dict(run.net, Value::dict(), {.strict = false}).missing_keys.empty());
    // The optimizer alone.
    set_state_dict(run.net, *run.optimizer, Value::dict(), optim);
    EXPECT_THAT(error_of([&] { (void)get_optimizer_state_dict(run.net, OptimizerRefs({})); }),
                HasSubstr("invalid_argument: no optimizer was given"));
    EXPECT_THAT(error_of([] { (void)get_model_state_dict(torch::nn::ReLU()); }),
                HasSubstr("invalid_argument: the model has neither parameters nor buffers"));
    // A part where the whole is expected, and the other way round.
    const auto whole = get_model_state_dict(run.net, {.full_state_dict = true});
    EXPECT_THAT(
        refusal(run, [&] { set_model_state_dict(run.net, model, {.full_state_dict = true}); }),
        HasSubstr("the state is a sharded one"));
    EXPECT_THAT(refusal(run, [&] { set_model_state_dict(run.net, whole); }),
                HasSubstr("the state has no part that is this rank's"));
  });
}

TEST(DistributedStateDict, StatesInListsHaveNoFlatKeys_P30) {
  auto net = make_net({});
  torch::optim::LBFGS optimizer(net->parameters(), torch::optim::LBFGSOptions(0.1).max_iter(3));
  optimizer.step([&] {
    optimizer.zero_grad();
    auto loss = testing::loss_of(net, testing::batch(0, 0, 1));
    loss.backward();
    return loss;
  });
  EXPECT_THAT(error_of([&] {
                (void)get_optimizer_state_dict(net, optimizer,
                                               {.flatten_optimizer_state_dict = true});
              }),
              HasSubstr("unsupported: only states that are tensors, numbers or dicts"));
  (void)get_optimizer_state_dict(net, optimizer);
}

}  // namespace
}  // namespace tessera
