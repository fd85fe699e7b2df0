// PyTorch's tests of FSDP's optimizer state (test_fsdp_optim_state.py) by its names: what one way
// of sharding saved goes into another (spec T-04 to T-12), and the functions' options (T-18 to
// T-24). Each runs on 2, 3 and 4 ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <unordered_map>

#include "optim_state/test_models.h"
#include "optim_state/test_states.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/tensor.h"

namespace tessera::testing {
namespace {

using ::testing::UnorderedElementsAre;

constexpr int kSteps = 3;

// The functions that carry a state from the first model to the second.
enum class Way : std::uint8_t {
  broadcast_and_shard,  // full_optim_state_dict, shard_full_optim_state_dict
  scatter,              // full_optim_state_dict, scatter_full_optim_state_dict
  flatten_sharded,      // sharded_optim_state_dict, flatten_sharded_optim_state_dict
  state_dict,           // optim_state_dict, optim_state_dict_to_load
};

struct LoadCase {
  Way way = Way::broadcast_and_shard;
  bool transformer = false;
  bool multiple_groups = false;
  bool halve = false;  // the second model is on the even ranks alone
  bool diff_inputs = false;
  bool use_optim_input = false;
  bool alternative = false;  // of the second model, like those that follow
  bool use_orig_params = false;
  StateDictOptions settings = {};  // for Way::state_dict
};

Trained init(const LoadCase& of, const TrainedOptions& options) {
  return of.transformer ? init_transformer(options) : init_nested(options);
}

std::optional<OptimInput> input_of(const LoadCase& of, const Trained& trained) {
  return of.use_optim_input ? trained.input : std::nullopt;
}

Value save(const LoadCase& of, const Trained& trained, const std::optional<Mesh>& group) {
  switch (of.way) {
    case Way::state_dict:
      return optim_state_dict(trained.module, *trained.optim, {.group = group});
    case Way::flatten_sharded:
      return sharded_optim_state_dict(trained.module, *trained.optim, {.group = group});
    default:
      return full_optim_state_dict(trained.module, *trained.optim,
                                   {.optim_input = input_of(of, trained), .group = group});
  }
}

// `saved` for the optimizer of `trained`, which is on `group`.
Value flatten(const LoadCase& of, Rank& rank, const Value& saved, const Trained& trained,
              const Mesh& group) {
  OptimTarget target;
  if (of.use_optim_input) {
    target.optim_input = trained.input;
  } else {
    target.optim = OptimizerRef(*trained.optim);
  }
  switch (of.way) {
    case Way::broadcast_and_shard:
      return shard_full_optim_state_dict(rank.broadcast(saved, group), trained.module, target);
    case Way::scatter:
      target.group = group;
      return scatter_full_optim_state_dict(group.rank() == 0 ? std::optional(saved) : std::nullopt,
                                           trained.module, target);
    case Way::flatten_sharded:
      return flatten_sharded_optim_state_dict(saved, trained.module, *trained.optim,
                                              {.group = group});
    default:
      return optim_state_dict_to_load(trained.module, *trained.optim, saved, {.group = group});
  }
}

// H-18 and H-19: a second model, trained the same on other ranks or wrapped otherwise, has to have
// what its own state and the first one's give it.
void loads_into_another_model(Rank& rank, const LoadCase& of) {
  auto first = init(of, {.mesh = &rank.mesh, .multiple_groups = of.multiple_groups});
  if (of.way == Way::state_dict) set_state_dict_type(first.module, of.settings);
  step_model(first, kSteps);
  const auto saved1 = save(of, first, std::nullopt);
  const auto group = of.halve ? rank.halved() : std::optional(rank.mesh);
  if (!group) return;
  // The rank in the group decides: if the rank among all did, as PyTorch has it, halving would
  // leave no odd one.
  auto second = init(of, {.mesh = &*group,
                          .alternative = of.alternative,
                          .multiple_groups = of.multiple_groups,
                          .reversed = of.diff_inputs && group->rank() % 2 == 1,
                          .use_orig_params = of.use_orig_params});
  if (of.way == Way::state_dict) set_state_dict_type(second.module, of.settings);
  step_model(second, kSteps);
  const auto saved2 = save(of, second, group);
  const auto sharded2 = flatten(of, rank, saved2, second, *group);
  const auto sharded1 = flatten(of, rank, saved1, second, *group);
  const auto local = optimizer_state_dict(*second.optim);
  EXPECT_GT(local.at("state").size(), 0u);
  {
    SCOPED_TRACE("the second model's own state");
    check_same(sharded2, local, Keys::same);
  }
  {
    SCOPED_TRACE("the first model's state");
    check_same(sharded1, local, Keys::same);
  }
  const auto before = copy_of(local);
  load_optimizer_state_dict(*second.optim, sharded2);
  EXPECT_TRUE(same(optimizer_state_dict(*second.optim), before));
  step_model(second, kSteps);
}

// The same, with and without optim_input, and then through optim_state_dict.
void loads_every_way(Rank& rank, LoadCase of, bool multiple_groups_of_state_dict) {
  for (const bool by_input : kBoth) {
    SCOPED_TRACE(by_input ? "with optim_input" : "without optim_input");
    of.use_optim_input = by_input;
    loads_into_another_model(rank, of);
  }
  SCOPED_TRACE("optim_state_dict");
  of.settings.optim.rank0_only = of.way == Way::scatter;
  of.way = Way::state_dict;
  of.use_optim_input = false;
  of.multiple_groups = multiple_groups_of_state_dict;
  loads_into_another_model(rank, of);
}

void flattens_sharded(Rank& rank, LoadCase of) {
  of.way = Way::flatten_sharded;
  loads_into_another_model(rank, of);
  SCOPED_TRACE("optim_state_dict");
  of.way = Way::state_dict;
  of.settings.type = StateDictType::sharded;
  loads_into_another_model(rank, of);
}

void loads_into_original_params(Rank& rank) {
  LoadCase of{.way = Way::state_dict, .use_orig_params = true};
  for (const bool rank0_only : kBoth) {
    of.settings = {.optim = {.rank0_only = rank0_only}};
    for (const bool halve : {true, false}) {
      for (const bool alternative : {true, false}) {
        SCOPED_TRACE("full" + flag("rank0_only", rank0_only) + flag("halve", halve) +
                     flag("wrap_alt", alternative));
        of.halve = halve;
        of.alternative = alternative;
        loads_into_another_model(rank, of);
      }
    }
  }
  of.halve = false;
  of.settings = {.type = StateDictType::sharded};
  for (const bool alternative : {true, false}) {
    SCOPED_TRACE("sharded" + flag("wrap_alt", alternative));
    of.alternative = alternative;
    loads_into_another_model(rank, of);
  }
}

std::vector<Case> load_cases() {
  struct Names {
    Way way;
    std::string nested, halved, transformer;
  };
  const Names all[] = {
      {Way::broadcast_and_shard, "test_shard_full_optim_state_dict_nested",
       "test_shard_full_optim_state_dict_nested_halve_world_size",
       "test_shard_full_optim_state_dict_transformer"},
      {Way::scatter, "test_scatter_full_optim_state_dict_nested",
       "test_scatter_full_optim_state_dict_nested_halve_world_size",
       "test_scatter_full_optim_state_dict_transformer"},
  };
  std::vector<Case> cases;
  for (const auto& [way, nested, halved, transformer] : all) {
    for (const bool multiple_groups : kBoth) {
      for (const bool alternative : kBoth) {
        for (const bool diff_inputs : kBoth) {
          const LoadCase of{.way = way,
                            .multiple_groups = multiple_groups,
                            .diff_inputs = diff_inputs,
                            .alternative = alternative};
          const bool again = way == Way::scatter && multiple_groups;
          cases.push_back({nested + flag("use_multiple_param_groups", multiple_groups) +
                               flag("wrap_alt", alternative) +
                               flag("use_diff_optim_inputs", diff_inputs),
                           [=](Rank& rank) { loads_every_way(rank, of, again); }});
        }
      }
    }
    const LoadCase halving{.way = way,
                           .multiple_groups = true,
                           .halve = true,
                           .diff_inputs = true,
                           .alternative = true};
    cases.push_back({halved, [=](Rank& rank) { loads_every_way(rank, halving, true); }});
    const LoadCase halving_transformer{.way = way, .transformer = true, .halve = true};
    cases.push_back(
        {transformer, [=](Rank& rank) { loads_every_way(rank, halving_transformer, false); }});
  }
  cases.push_back({"test_flatten_sharded_optim_state_dict_nested",
                   [](Rank& rank) { flattens_sharded(rank, {.alternative = true}); }});
  cases.push_back({"test_flatten_sharded_optim_state_dict_transformer",
                   [](Rank& rank) { flattens_sharded(rank, {.transformer = true}); }});
  cases.push_back({"test_use_orig_params", loads_into_original_params});
  return cases;
}

// T-18 ----------------------------------------------------------------------------------------

void names_what_each_rank_has(Rank& rank) {
  FakeMpModel models[] = {FakeMpModel(rank.mesh), FakeMpModel(rank.mesh)};
  const auto plain = make_adam(models[0], 1e-2), adam = make_adam(models[1], 1e-2);
  NamedOptimizer named(models[1], *adam);
  const OptimizerRef optims[] = {*plain, named};
  torch::optim::Adam* steppers[] = {plain.get(), adam.get()};
  auto generator = generator_of(10 + rank.mesh.rank());
  const auto batch = torch::rand({5, 8}, generator);
  std::vector<Value> saved;
  for (int i = 0; i < 2; ++i) {
    give_zero_gradients(models[i]);
    steppers[i]->step();
    models[i](batch).sum().backward();
    steppers[i]->step();
    saved.push_back(copy_of(optim_state_dict(models[i], optims[i])));
  }
  const std::string own = rank.mesh.rank() == 0 ? "sparse0.0." : "sparse1.0.";
  EXPECT_THAT(keys_of(saved[0].at("state")),
              UnorderedElementsAre("dense.net1.0.weight", "dense.net1.0.bias",
                                   "dense.net2.0.weight", "dense.net2.0.bias", "dense.net3.weight",
                                   "dense.net3.bias", "dense.net4.1.weight", "dense.net4.1.bias",
                                   own + "weight", own + "bias"));
  const auto expect_same = [&](const Value& state_dict) {
    check_same_param_groups(saved[0], state_dict, Keys::differ);
    check_same_state(saved[0], state_dict, Keys::same);
  };
  expect_same(saved[1]);
  for (int step = 0; step < 5; ++step) {
    models[1](torch::rand({5, 8}, generator)).sum().backward();
    adam->step();
  }
  EXPECT_FALSE(same(optim_state_dict(models[1], named).at("state"), saved[0].at("state")));
  named.load_state_dict(
      optim_state_dict_to_load(models[1], named, saved[1], {.is_named_optimizer = true}));
  expect_same(optim_state_dict(models[1], named));
}

// T-19, T-20 ----------------------------------------------------------------------------------

void leaves_groups_out_where_there_are_none(Rank& rank) {
  auto model = fsdp(SimpleModel(), rank.mesh);
  const auto optim = make_adam(model, 1e-2);
  auto generator = generator_of(4);
  const auto batch = torch::rand({3, 2}, generator);
  const auto train = [&] {
    give_zero_gradients(model);
    optim->step();
    model(batch).sum().backward();
  };
  train();
  const auto original = copy_of(optimizer_state_dict(*optim));
  const auto saved = copy_of(
      optim_state_dict(model, *optim, {.optim_state_dict = without(original, "param_groups")}));
  EXPECT_EQ(saved.find("param_groups"), nullptr);
  train();
  EXPECT_FALSE(same(optimizer_state_dict(*optim), original));
  auto to_load = optim_state_dict_to_load(model, *optim, saved);
  EXPECT_EQ(to_load.find("param_groups"), nullptr);
  to_load.set_item("param_groups", original.at("param_groups"));
  load_optimizer_state_dict(*optim, to_load);
  EXPECT_TRUE(same(optimizer_state_dict(*optim), original));  // padding too
  check_same_state(saved, optim_state_dict(model, *optim), Keys::same);
}

void saves_an_optimizer_without_state(Rank& rank) {
  auto model = fsdp(DummyModel(), rank.mesh);
  const auto optim = make_adam(model, 1e-2);
  const auto saved = optim_state_dict(model, *optim);
  EXPECT_EQ(saved.at("state").size(), 0u);
  EXPECT_EQ(optimizer_state_dict(*optim).at("state").size(), 0u);
  EXPECT_EQ(saved.at("param_groups").items().at(0).at("params").size(), 8u);
}

// T-21 ----------------------------------------------------------------------------------------

void step_dummy(DummyModel& model, torch::optim::Optimizer& optim) {
  const auto loss = model(model->get_input());
  loss.backward(loss.detach());
  optim.step();
}

// Every tensor but scalars is a sharded one, or none is.
void expect_sharded(const Value& state_dict, bool sharded) {
  EXPECT_EQ(state_dict.at("state").size(), 8u);
  for (const auto& [key, state] : state_dict.at("state").pairs()) {
    for (const auto& [name, value] : state.pairs()) {
      const auto& leaf = value.as_tensor();
      EXPECT_EQ(leaf.sharded, sharded && !leaf.shape.empty()) << key.as_string();
      EXPECT_EQ(leaf.pieces.size(), 1u) << key.as_string();  // no rank has less than a row
      EXPECT_TRUE(leaf.pieces.at(0).storage && leaf.pieces[0].storage->data != nullptr);
    }
  }
}

void does_what_its_arguments_say(Rank& rank) {
  auto model = fsdp(DummyModel(), rank.mesh);
  const auto optim = make_adam(model, 1e-2);
  step_dummy(model, *optim);
  const auto original = copy_of(optimizer_state_dict(*optim));
  const OptimStateOptions from_original{.optim_state_dict = original};
  const auto saved = optim_state_dict(model, *optim, from_original);
  check_same_state(optim_state_dict(model, *optim), saved, Keys::same);
  step_dummy(model, *optim);
  EXPECT_FALSE(same(optimizer_state_dict(*optim), original));
  optim_state_dict_to_load(model, *optim, saved, {.load_directly = true});
  EXPECT_TRUE(same(optimizer_state_dict(*optim), original));

  expect_sharded(optim_state_dict(model, *optim, from_original), false);
  {
    const StateDictTypeScope sharded(
        model, {.type = StateDictType::sharded, .optim = {.offload_to_cpu = false}});
    expect_sharded(optim_state_dict(model, *optim, from_original), true);
  }
  const StateDictTypeScope full(model, {.optim = {.rank0_only = true}});
  const auto on_rank0 = optim_state_dict(model, *optim, from_original);
  if (rank.mesh.rank() == 0) {
    expect_sharded(on_rank0, false);
  } else {
    EXPECT_EQ(on_rank0.size(), 0u);
  }
}

// T-22 ----------------------------------------------------------------------------------------

// An optimizer whose state holds no tensor: what SGD without momentum is in older PyTorch, where
// the test's second half still has something to look at.
class WithoutTensors : public OptimizerAccess {
 public:
  explicit WithoutTensors(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_)
      set_state(parameter, Value::dict({{"value1", 2.74}, {"value2", Value()}}), false);
  }
  std::vector<std::vector<at::Tensor>> parameters() const override { return {parameters_}; }
  Value group(std::size_t) const override { return Value::dict({{"lr", 1e-2}}); }
  void check_group(std::size_t, const Value&) const override {}
  void set_group(std::size_t, const Value&) override {}
  Value state(const at::Tensor& parameter) const override {
    const auto at = states_.find(parameter.unsafeGetTensorImpl());
    return at == states_.end() ? Value() : at->second;
  }
  void check_state(const at::Tensor&, const Value&) const override {}
  void set_state(const at::Tensor& parameter, const Value& state, bool) override {
    states_[parameter.unsafeGetTensorImpl()] = state;
  }

 private:
  std::vector<at::Tensor> parameters_;
  std::unordered_map<const c10::TensorImpl*, Value> states_;
};

void keeps_values_that_are_no_tensors(Rank& rank, bool use_orig_params, bool has_tensors) {
  auto model = fsdp(DummyModel(), rank.mesh, {.use_orig_params = use_orig_params});
  const auto adam = make_adam(model, 1e-2);
  const OptimizerRef optim = has_tensors ? OptimizerRef(*adam)
                                         : OptimizerRef(std::make_shared<WithoutTensors>(
                                               local_tensors(sharded_parameters(model))));
  step_dummy(model, *adam);
  const auto original = copy_of(optimizer_state_dict(optim));
  EXPECT_GT(original.at("state").size(), 0u);
  for (const auto& pair : original.at("state").pairs()) {
    auto state = pair.second;
    state.set_item("value1", 2.74);
    state.set_item("value2", Value());
  }
  const auto saved = optim_state_dict(model, optim, {.optim_state_dict = original});
  EXPECT_EQ(saved.at("state").size(), 8u);
  const auto to_load = optim_state_dict_to_load(model, optim, saved);
  EXPECT_GT(to_load.at("state").size(), 0u);
  for (const auto& [key, state] : to_load.at("state").pairs()) {
    EXPECT_EQ(state.at("value1"), Value(2.74));
    EXPECT_TRUE(state.at("value2").is(Value::Kind::none));
    EXPECT_EQ(state.find("exp_avg") != nullptr, has_tensors);
  }
}

// T-23, T-24 ----------------------------------------------------------------------------------

void goes_back_where_nothing_is_sharded(Rank& rank, bool use_orig_params) {
  auto model =
      fsdp(DummyModel(), rank.mesh,
           {.sharding_strategy = ShardingStrategy::no_shard, .use_orig_params = use_orig_params});
  const auto optim = make_adam(model, 1e-2);
  step_dummy(model, *optim);
  const auto original = copy_of(optimizer_state_dict(*optim));
  EXPECT_GT(original.at("state").size(), 0u);
  const auto to_load = optim_state_dict_to_load(model, *optim, optim_state_dict(model, *optim));
  EXPECT_TRUE(same(to_load, original));
  load_optimizer_state_dict(*optim, to_load);
  EXPECT_TRUE(same(optimizer_state_dict(*optim), original));
}

void follows_what_is_frozen(Rank& rank) {
  auto model = fsdp(DummyModel(true), rank.mesh, {.use_orig_params = true});
  const auto optim = make_adam(model, 1e-2);
  for (int i = 0; i < 5; ++i) {
    for (auto& parameter : model->net1->parameters()) parameter.set_requires_grad(i % 2 == 1);
    model(model->get_input()).sum().backward();
    optim->step();
    const auto original = copy_of(optimizer_state_dict(*optim));
    const auto saved = optim_state_dict(model, *optim);
    // Frozen and never trained; trained; frozen with what it has from before.
    const auto step_of = [&](const char* name) {
      return tensor_in(saved.at("state").at(name).at("step")).item<float>();
    };
    EXPECT_EQ(step_of("net2.0.weight"), i + 1);
    EXPECT_EQ(saved.at("state").find("net1.0.weight") != nullptr, i > 0) << i;
    if (i > 0) {
      EXPECT_LT(step_of("net1.0.weight"), i + 1) << i;
    }
    optim_state_dict_to_load(model, *optim, saved, {.load_directly = true});
    EXPECT_TRUE(same(optimizer_state_dict(*optim).at("state"), original.at("state"))) << i;
  }
}

std::vector<Case> option_cases() {
  return {
      {"test_compatible_with_trec", names_what_each_rank_has},
      {"test_optim_state_without_param_groups", leaves_groups_out_where_there_are_none},
      {"test_with_empty_optimizer_state", saves_an_optimizer_without_state},
      {"test_interface_arguments", does_what_its_arguments_say},
      {"test_state_dict_with_none_tensor_state",
       [](Rank& rank) {
         for (const bool use_orig_params : kBoth) {
           for (const bool has_tensors : kBoth)
             keeps_values_that_are_no_tensors(rank, use_orig_params, has_tensors);
         }
       }},
      {"test_with_no_shard",
       [](Rank& rank) {
         for (const bool use_orig_params : kBoth)
           goes_back_where_nothing_is_sharded(rank, use_orig_params);
       }},
      {"test_no_grad", follows_what_is_frozen},
  };
}

const bool load_cases_registered = register_cases(load_cases()) && register_cases(option_cases());

// PyTorch's test has this way too and never goes it.
TEST(FsdpOptimStateWays, ToLoadWithoutAGroup_Q26) {
  run_worlds([](Rank& rank) {
    for (const auto type : {StateDictType::full, StateDictType::sharded}) {
      LoadCase of{.way = Way::state_dict, .multiple_groups = true, .alternative = true};
      of.settings.type = type;
      loads_into_another_model(rank, of);
    }
  });
}

}  // namespace
}  // namespace tessera::testing
