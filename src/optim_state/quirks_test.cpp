// PyTorch's functions lose, alias or hang here; this is what happens instead (spec section 8).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "base/testing.h"
#include "fsdp/testing/counting_transport.h"
#include "optim_state/testing.h"
#include "tessera/error.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch;
using testing::Counts;
using testing::error_of;
using testing::expect_same;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::make_optimizer;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::train;
using testing::Way;

// A model after two steps.
struct Trained {
  Net net;
  testing::Optimizer optimizer;
};
Trained trained(Way way, const Mesh& mesh) {
  Trained made{make_net({}), nullptr};
  shard(made.net, way, mesh);
  made.optimizer = make_optimizer(made.net);
  train(made.net, *made.optimizer, 0, 2);
  return made;
}

Value changed(const Value& tree, const Value& key, const std::function<void(Value&)>& change) {
  auto states = Value::dict();
  for (const auto& [name, value] : tree.at("state").pairs()) {
    auto copy = value.is(Value::Kind::dict) ? Value::dict(value.pairs()) : value;
    if (name == key) change(copy);
    states.set_item(name, copy);
  }
  auto made = Value::dict({{"state", states}});
  if (const auto* groups = tree.find("param_groups")) made.set_item("param_groups", *groups);
  return made;
}
Value with_key(const Value& tree, const Value& key, const Value& value) {
  auto states = Value::dict({{key, value}});
  for (const auto& [name, state] : tree.at("state").pairs()) {
    if (!(name == key)) states.set_item(name, state);
  }
  return Value::dict({{"state", states}, {"param_groups", tree.at("param_groups")}});
}
Value without(const Value& tree, const std::string& key) {
  auto states = Value::dict();
  for (const auto& [name, state] : tree.at("state").pairs()) {
    if (!(name == Value(key))) states.set_item(name, state);
  }
  return Value::dict({{"state", states}, {"param_groups", tree.at("param_groups")}});
}
at::Tensor tensor_at(const Value& tree, const std::string& name, const char* state) {
  return tensor_of(tree.at("state").at(name).at(state).as_tensor());
}

void collect_memory(const Value& tree, std::multiset<const void*>& found) {
  if (tree.is(Value::Kind::dict)) {
    for (const auto& [key, value] : tree.pairs()) collect_memory(value, found);
  } else if (tree.is(Value::Kind::tensor)) {
    for (const auto& piece : tree.as_tensor().pieces) {
      const auto size = static_cast<std::int64_t>(size_of(tree.as_tensor().dtype));
      if (piece.storage && numel(piece.slice) > 0)
        found.insert(piece.storage->data + piece.storage_offset * size);
    }
  }
}

class OptimStateQuirks : public ::testing::TestWithParam<Way> {};

// no two entries share memory, nor does any with the optimizer.
TEST_P(OptimStateQuirks, NothingIsAliased_Q06_Q07_Q15) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto own = optimizer_state_dict(*optimizer);
    const auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    const auto in_chunks = sharded_optim_state_dict(net, *optimizer);
    std::multiset<const void*> memory;
    for (const auto& tree : {own, full, in_chunks}) collect_memory(tree, memory);
    const std::set<const void*> distinct(memory.begin(), memory.end());
    EXPECT_EQ(distinct.size(), memory.size());
  });
}

// an optimizer of the whole model that loads the state counts on by one a step.
TEST_P(OptimStateQuirks, StepsCountOnByOne_Q15) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    auto whole = make_net({});
    auto other = make_optimizer(whole);
    load_optimizer_state_dict(*other,
                              rekey_optim_state_dict(full, OptimStateKeyType::PARAM_ID, whole,
                                                     {.optim = OptimizerRef(*other)}));
    train(whole, *other, 2, 1);
    const auto own = optimizer_state_dict(*other);
    for (const auto& [key, state] : own.at("state").pairs())
      EXPECT_EQ(tensor_of(state.at("step").as_tensor()).item<float>(), 3);
  });
}

// state of users and values that are no tensors go through rank 0 as the rest does.
TEST_P(OptimStateQuirks, AnyValueIsScattered_Q01_Q02) {
  run_mesh(3, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto own = optimizer_state_dict(*optimizer);
    auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    const auto add = [](Value& state) {
      state.set_item("none", Value());
      state.set_item("real", 2.74);
      state.set_item("text", "abc");
      state.set_item("list", Value::list({Value(1), leaf_of(torch::arange(3))}));
    };
    const auto unchanged = full;
    for (const auto& [name, state] : unchanged.at("state").pairs()) full = changed(full, name, add);
    full = with_key(full, "mine", leaf_of(torch::arange(6).view({2, 3})));
    full = with_key(full, "nested", Value::dict({{"deep", leaf_of(torch::ones({4}))}}));
    const auto before = full;
    const auto given = mesh.rank() == 0 ? std::optional(full) : std::nullopt;
    const auto scattered =
        scatter_full_optim_state_dict(given, net, {.optim = OptimizerRef(*optimizer)});
    const auto sharded =
        shard_full_optim_state_dict(full, net, {.optim = OptimizerRef(*optimizer)});
    expect_same(scattered, sharded);
    expect_same(full, before);
    const auto& states = scattered.at("state");
    EXPECT_TRUE(
        torch::equal(tensor_of(states.at("mine").as_tensor()), torch::arange(6).view({2, 3})));
    EXPECT_TRUE(
        torch::equal(tensor_of(states.at("nested").at("deep").as_tensor()), torch::ones({4})));
    for (const auto& [key, state] : own.at("state").pairs()) {
      for (const auto& [given_key, loaded] : states.pairs()) {
        if (!(given_key == key)) continue;
        EXPECT_TRUE(loaded.at("none").is(Value::Kind::none));
        EXPECT_EQ(loaded.at("real").as_real(), 2.74);
        EXPECT_EQ(loaded.at("text").as_string(), "abc");
        EXPECT_EQ(loaded.at("list").size(), 2U);
      }
    }
  });
}

// Q-20, E-04, X58: who has no state says so on every rank.
TEST_P(OptimStateQuirks, WithoutStateAllRanksThrow_Q20_E04) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const OptimTarget target{.optim = OptimizerRef(*optimizer)};
    EXPECT_THAT(error_of([&] { (void)scatter_full_optim_state_dict(std::nullopt, net, target); }),
                HasSubstr("must have the keys \"state\""));
    EXPECT_THAT(error_of([&] { (void)shard_full_optim_state_dict(Value::dict(), net, target); }),
                HasSubstr("must have the keys \"state\""));
    // One rank alone gives something wrong.
    const auto good = optimizer_state_dict(*optimizer);
    const auto given = mesh.rank() == 1 ? Value::dict() : good;
    EXPECT_THAT(
        error_of([&] { (void)optim_state_dict(net, *optimizer, {.optim_state_dict = given}); }),
        HasSubstr("state"));
    // The next call works.
    EXPECT_NO_THROW((void)optim_state_dict(net, *optimizer));
  });
}

// E-20, E-21, E-22: what ranks disagree on is found before data moves, by all.
TEST_P(OptimStateQuirks, DifferencesAreFoundByAllRanks_E20_E21_E22) {
  run_mesh(3, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto own = optimizer_state_dict(*optimizer);
    const auto refused = [&](const std::function<void(Value&)>& change) {
      auto given = own;
      if (mesh.rank() == 1) {
        for (const auto& [key, state] : own.at("state").pairs())
          given = changed(given, key, change);
      }
      return error_of(
          [&] { (void)optim_state_dict(net, *optimizer, {.optim_state_dict = given}); });
    };
    EXPECT_THAT(refused([](Value& s) { s.set_item("step", leaf_of(torch::tensor(9.0F))); }),
                HasSubstr("has different values for step"));
    EXPECT_THAT(refused([](Value& s) { s.set_item("value", 7); }), HasSubstr("state value"));
    EXPECT_THAT(refused([](Value& s) { s.set_item("exp_avg", leaf_of(torch::zeros({1000}))); }),
                HasSubstr("1000 elements of state exp_avg"));
    EXPECT_THAT(refused([](Value& s) {
                  const auto tensor = tensor_of(s.at("exp_avg").as_tensor());
                  s.set_item("exp_avg", leaf_of(tensor.to(torch::kDouble)));
                }),
                HasSubstr("has different values for exp_avg"));
    expect_same(optim_state_dict(net, *optimizer, {.optim_state_dict = own}),
                optim_state_dict(net, *optimizer));
  });
}

// E-28, Q-10: a part of a parameter whose rank has no state of it, whichever rank that is.
TEST_P(OptimStateQuirks, MissingPartsAreFoundByAllRanks_E17_E28_Q10) {
  for (const int lacking : {0, 1}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto [net, optimizer] = trained(GetParam(), mesh);
      const auto own = optimizer_state_dict(*optimizer);
      auto given = own;
      if (mesh.rank() == lacking) {
        std::vector<Value::Pair> rest;
        for (const auto& [key, state] : own.at("state").pairs()) {
          if (key.as_int() % 2 == 1) rest.emplace_back(key, state);
        }
        given =
            Value::dict({{"state", Value::dict(rest)}, {"param_groups", own.at("param_groups")}});
      }
      const auto text =
          error_of([&] { (void)optim_state_dict(net, *optimizer, {.optim_state_dict = given}); });
      EXPECT_THAT(text, ::testing::AnyOf(HasSubstr("is missing states for the parameters"),
                                         HasSubstr("is not in the optimizer state of rank")));
    });
  }
}

// NaN is equal to itself. Q-17: lists are compared, not hashed.
TEST_P(OptimStateQuirks, NanAndListsAreValues_Q16_Q17) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto unchanged = optimizer_state_dict(*optimizer);
    auto own = unchanged;
    for (const auto& [key, state] : unchanged.at("state").pairs()) {
      own = changed(own, key, [](Value& s) {
        s.set_item("nan", leaf_of(torch::tensor(std::nanf(""))));
        s.set_item("list", Value::list({Value(1), Value::dict({{"a", 2}})}));
      });
    }
    const auto full = optim_state_dict(net, *optimizer, {.optim_state_dict = own});
    const auto loaded = optim_state_dict_to_load(net, *optimizer, full);
    EXPECT_EQ(loaded.at("state").pairs().front().second.at("list").size(), 2U);
    EXPECT_TRUE(std::isnan(
        tensor_of(loaded.at("state").pairs().front().second.at("nan").as_tensor()).item<float>()));
  });
}

// Q-18, E-32.
TEST_P(OptimStateQuirks, TheLocalKindIsRefused_Q18_E32) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const StateDictTypeScope scope(net, {.type = StateDictType::local});
    EXPECT_THAT(error_of([&] { (void)optim_state_dict(net, *optimizer); }),
                HasSubstr("Found state_dict_type LOCAL_STATE_DICT"));
    EXPECT_THAT(error_of([&] { (void)optim_state_dict_to_load(net, *optimizer, Value::dict()); }),
                HasSubstr("Found state_dict_type LOCAL_STATE_DICT"));
  });
}

// what the optimizer does not have.
TEST_P(OptimStateQuirks, UnknownParametersAreSaid_Q21) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    auto group = Value::dict(full.at("param_groups").items().front().pairs());
    auto params = group.at("params").items();
    params.emplace_back("no.such.parameter");
    group.set_item("params", Value::list(params));
    const auto wrong =
        Value::dict({{"state", full.at("state")}, {"param_groups", Value::list({group})}});
    EXPECT_THAT(error_of([&] { (void)optim_state_dict_to_load(net, *optimizer, wrong); }),
                HasSubstr("no.such.parameter"));
  });
}

// a user's name before the numbers makes no optimizer by names.
TEST_P(OptimStateQuirks, UsersNamesMakeNoNamedOptimizer_Q23) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto own = with_key(optimizer_state_dict(*optimizer), "mine", Value(7));
    const auto full = optim_state_dict(net, *optimizer, {.optim_state_dict = own});
    EXPECT_EQ(full.at("state").at("mine").as_int(), 7);
    EXPECT_EQ(full.at("state").size(), optim_state_dict(net, *optimizer).at("state").size() + 1);
    // It is seen by names, whoever asks.
    NamedOptimizer named(net, *optimizer);
    expect_same(optim_state_dict(net, *optimizer, {.optim_state_dict = named.state_dict()}),
                optim_state_dict(net, named));
  });
}

// Data moves once a state of a unit; less than section 9 counts.
TEST_P(OptimStateQuirks, CollectivesAreFew) {
  std::vector<Counts> of_ranks(2);
  run_mesh(2, [&](Mesh& mesh) {
    auto& counts = of_ranks[mesh.rank()];
    testing::count(mesh, counts);
    auto [net, optimizer] = trained(GetParam(), mesh);
    const auto whole = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    const auto chunks = sharded_optim_state_dict(net, *optimizer);
    // exp_avg, exp_avg_sq and max_exp_avg_sq of four units.
    counts = {};
    (void)full_optim_state_dict(net, *optimizer);
    EXPECT_EQ(counts, (Counts{.exchanges = 12, .messages = 1}));
    counts = {};
    (void)sharded_optim_state_dict(net, *optimizer);
    const bool is_cut_alike = GetParam() == Way::rows;
    EXPECT_EQ(counts, (Counts{.exchanges = is_cut_alike ? 0 : 12, .messages = 1}));
    counts = {};
    (void)shard_full_optim_state_dict(whole, net, {.optim = OptimizerRef(*optimizer)});
    EXPECT_EQ(counts, Counts{});
    (void)flatten_sharded_optim_state_dict(chunks, net, *optimizer);
    EXPECT_EQ(counts, (Counts{.exchanges = is_cut_alike ? 0 : 12, .messages = 1}));
    counts = {};
    (void)scatter_full_optim_state_dict(whole, net, {.optim = OptimizerRef(*optimizer)});
    EXPECT_EQ(counts, Counts{.messages = 1});
  });
}

// They describe tensors; data travels between units.
TEST(OptimStateMessages, CarryNoData) {
  std::vector<Counts> of_ranks(2);
  run_mesh(2, [&](Mesh& mesh) {
    auto& counts = of_ranks[mesh.rank()];
    testing::count(mesh, counts);
    torch::nn::Linear net(200, 200);
    fully_shard(net, mesh);
    torch::optim::Adam optimizer(local_tensors(sharded_parameters(net)));
    call_module(net, torch::ones({1, 200})).sum().backward();
    optimizer.step();
    counts = {};
    (void)full_optim_state_dict(net, optimizer);
    EXPECT_LT(counts.message_bytes, 4000U);
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, OptimStateQuirks,
                         ::testing::Values(Way::rows, Way::flat, Way::original, Way::aligned),
                         [](const auto& of) { return testing::name_of(of.param); });

// the first parameter of a flat one has no state.
TEST(FlatOptimState, MissesAreFoundAnywhere_Q03_Q04_E10e) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    shard(net, Way::flat, mesh);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, 1);
    const OptimTarget target{.optim = OptimizerRef(*optimizer)};
    const auto full = without(full_optim_state_dict(net, *optimizer, {.rank0_only = false}),
                              "block0.norm.weight");
    const std::string expected =
        "All unflattened parameters comprising a single flat parameter must have scalar state";
    EXPECT_THAT(error_of([&] { (void)shard_full_optim_state_dict(full, net, target); }),
                HasSubstr(expected));
    EXPECT_THAT(error_of([&] { (void)scatter_full_optim_state_dict(full, net, target); }),
                HasSubstr(expected));
    // Without scalars zeros stand for it.
    torch::optim::SGD sgd(local_tensors(sharded_parameters(net)),
                          torch::optim::SGDOptions(0.1).momentum(0.9));
    train(net, sgd, 1, 1);
    const auto momentum = full_optim_state_dict(net, sgd, {.rank0_only = false});
    const auto loaded = shard_full_optim_state_dict(without(momentum, "block0.norm.weight"), net,
                                                    {.optim = OptimizerRef(sgd)});
    load_optimizer_state_dict(sgd, loaded);
    const auto again = full_optim_state_dict(net, sgd, {.rank0_only = false});
    EXPECT_EQ(tensor_at(again, "block0.norm.weight", "momentum_buffer").abs().sum().item<float>(),
              0);
    EXPECT_TRUE(torch::equal(tensor_at(again, "block0.up.weight", "momentum_buffer"),
                             tensor_at(momentum, "block0.up.weight", "momentum_buffer")));
  });
}

// E-08, E-09, E-10a, E-10c, E-10e.
TEST(FlatOptimState, TakesWhatOneTensorCanHold_E08_E09_E10) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(Way::flat, mesh);
    const auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    const auto refused = [&](const std::function<void(Value&)>& change) {
      const auto wrong = changed(full, "block0.up.bias", change);
      return error_of([&] {
        (void)shard_full_optim_state_dict(wrong, net, {.optim = OptimizerRef(*optimizer)});
      });
    };
    EXPECT_THAT(refused([](Value& s) { s.set_item("more", 1); }),
                HasSubstr("Differing optimizer state names for the unflattened parameters"));
    EXPECT_THAT(refused([](Value& s) { s.set_item("exp_avg", 1.5); }),
                HasSubstr("Differing optimizer state types for state exp_avg"));
    EXPECT_THAT(refused([](Value& s) {
                  s.set_item("exp_avg", leaf_of(torch::zeros({13}, torch::kDouble)));
                }),
                HasSubstr("with the same dtype but got dtypes"));
    EXPECT_THAT(refused([](Value& s) { s.set_item("exp_avg", leaf_of(torch::zeros({12}))); }),
                HasSubstr("does not have same shape as its parameter: [12] [13]"));
    EXPECT_THAT(refused([](Value& s) { s.set_item("step", leaf_of(torch::tensor(5.0F))); }),
                HasSubstr("scalar state with the same value and dtype"));
    // None for all is None; None for some and tensors for others are zeros.
    EXPECT_EQ(refused([](Value& s) { s.set_item("exp_avg", Value()); }), "no Error");
  });
}

// each state of each parameter has its own dtype.
TEST(OriginalOptimState, KeepsDtypesOfEachParameter_Q05) {
  run_mesh(2, [](Mesh& mesh) {
    auto [net, optimizer] = trained(Way::original, mesh);
    const auto unchanged = optimizer_state_dict(*optimizer);
    auto own = unchanged;
    std::size_t at = 0;
    for (const auto& [key, state] : unchanged.at("state").pairs()) {
      // The same parameters on both ranks: by their number.
      if (key.as_int() % 2 == 0) continue;
      ++at;
      own = changed(own, key, [](Value& s) {
        s.set_item("exp_avg", leaf_of(tensor_of(s.at("exp_avg").as_tensor()).to(torch::kDouble)));
      });
    }
    ASSERT_GT(at, 0U);
    const auto full = optim_state_dict(net, *optimizer, {.optim_state_dict = own});
    std::set<DType> types;
    for (const auto& [name, state] : full.at("state").pairs())
      types.insert(state.at("exp_avg").as_tensor().dtype);
    EXPECT_EQ(types, (std::set{DType::float32, DType::float64}));
  });
}

// a state under the second name of a shared parameter.
TEST(SharedOptimState, IsFoundUnderAnyName_Q22) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.tied = true});
    fully_shard(net, mesh);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, 1);
    const auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    ASSERT_NE(full.at("state").find("embed.weight"), nullptr);
    ASSERT_EQ(full.at("state").find("head.weight"), nullptr);
    auto renamed = Value::dict();
    for (const auto& [name, state] : full.at("state").pairs())
      renamed.set_item(name == Value("embed.weight") ? Value("head.weight") : name, state);
    const auto moved = Value::dict({{"state", renamed}, {"param_groups", full.at("param_groups")}});
    expect_same(optim_state_dict_to_load(net, *optimizer, moved),
                optim_state_dict_to_load(net, *optimizer, full));
  });
}

// a model that nobody sharded.
TEST(UnshardedOptimState, NeedsNoMesh_Q19) {
  auto net = make_net({});
  auto optimizer = make_optimizer(net);
  train(net, *optimizer, 0, 2);
  const auto full = optim_state_dict(net, *optimizer);
  EXPECT_EQ(full.at("state").size(), net->parameters().size());
  expect_same(optim_state_dict_to_load(net, *optimizer, full), optimizer_state_dict(*optimizer));
}

// the group's rank 0 need not be the first of all ranks.
TEST(GroupsOfOptimState, HaveTheirOwnRankZero_Q12) {
  run_mesh(4, [](Mesh& mesh) {
    const auto pair = mesh.split(2).shard;
    auto net = make_net({});
    shard(net, Way::flat, pair);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, 1);
    const auto full = full_optim_state_dict(net, *optimizer);
    EXPECT_EQ(full.size() == 0, pair.rank() != 0);
    const auto given = pair.rank() == 0 ? std::optional(full) : std::nullopt;
    expect_same(scatter_full_optim_state_dict(given, net, {.optim = OptimizerRef(*optimizer)}),
                optimizer_state_dict(*optimizer));
  });
}

TEST(RekeyedOptimState, RefusesMixedKeysAndSharesWhatFits_L8) {
  auto net = make_net({});
  auto optimizer = make_optimizer(net);
  train(net, *optimizer, 0, 1);
  const auto own = optimizer_state_dict(*optimizer);
  const OptimTarget target{.optim = OptimizerRef(*optimizer)};
  const auto same = rekey_optim_state_dict(own, OptimStateKeyType::PARAM_ID, net, target);
  EXPECT_EQ(same.identity(), own.identity());
  const auto named = rekey_optim_state_dict(own, OptimStateKeyType::PARAM_NAME, net, target);
  EXPECT_NE(named.at("state").find("block0.up.weight"), nullptr);
  expect_same(rekey_optim_state_dict(named, OptimStateKeyType::PARAM_ID, net, target), own);
  const auto mixed = with_key(own, "mine", Value(7));
  EXPECT_THAT(error_of([&] {
                (void)rekey_optim_state_dict(mixed, OptimStateKeyType::PARAM_NAME, net, target);
              }),
              HasSubstr("Invalid parameter keys"));
  // A flat parameter has no one name (X60).
  run_mesh(2, [](Mesh& mesh) {
    auto [flat, of_flat] = trained(Way::flat, mesh);
    EXPECT_THAT(error_of([&, &optim = *of_flat, &model = flat] {
                  (void)rekey_optim_state_dict(optimizer_state_dict(optim),
                                               OptimStateKeyType::PARAM_NAME, model,
                                               {.optim = OptimizerRef(optim)});
                }),
                HasSubstr("Each parameter should only map to one parameter name"));
  });
}

TEST(OptimStateWarnings, AreGivenForInputsAndForeignKeys_E30_T16) {
  run_mesh(1, [](Mesh& mesh) {
    auto [net, optimizer] = trained(Way::rows, mesh);
    const OptimInput input{local_tensors(sharded_parameters(net))};
    EXPECT_THAT(testing_support::warnings_of(
                    [&] { (void)full_optim_state_dict(net, *optimizer, {.optim_input = input}); }),
                ::testing::Contains(HasSubstr("`optim_input` argument is deprecated")));
    const auto own = with_key(optimizer_state_dict(*optimizer), "mine", Value(7));
    EXPECT_THAT(testing_support::warnings_of(
                    [&] { (void)optim_state_dict(net, *optimizer, {.optim_state_dict = own}); }),
                ::testing::Contains(HasSubstr("that FSDP cannot process")));
    EXPECT_THAT(error_of([&] {
                  (void)full_optim_state_dict(net, *optimizer, {.optim_input = OptimInput{}});
                }),
                HasSubstr("Optimizer input should not be empty"));
  });
}

}  // namespace
}  // namespace tessera
