// What a TrainingState holds besides model and optimizer, of all ranks and of each, and whose state
// it is.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/testing.h"
#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/testing.h"
#include "tessera/error.h"
#include "tessera/lr_scheduler.h"
#include "tessera/tensor_value.h"
#include "tessera/training_state.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::loss_of;
using testing::make_net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

// Adam's decay goes through its moments: AdamW would go on with other numbers.
TEST(TrainingState, OfOneOptimizerIsNoStateOfAnother) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/";
  const auto alone = solo_group();
  auto net = make_net({});
  const auto parameters = net->parameters();
  torch::optim::Adam adam(parameters, torch::optim::AdamOptions(0.01).weight_decay(0.1));
  torch::optim::SGD sgd(parameters, torch::optim::SGDOptions(0.01).momentum(0.9));
  torch::optim::RMSprop rmsprop(parameters, 0.01);
  AdamW adamw(sharded_parameters(net));
  loss_of(net, testing::batch(0, 0, 1)).backward();
  for (torch::optim::Optimizer* one :
       {static_cast<torch::optim::Optimizer*>(&adam), static_cast<torch::optim::Optimizer*>(&sgd),
        static_cast<torch::optim::Optimizer*>(&rmsprop)})
    one->step();
  adamw.step();
  const std::vector<std::pair<std::string, OptimizerRef>> all{
      {"Adam", adam}, {"SGD", sgd}, {"RMSprop", rmsprop}, {"AdamW", adamw}};
  for (const auto& [name, optimizer] : all)
    save(TrainingState(net, optimizer), path + name, *alone);
  for (const auto& [saved, unused] : all) {
    for (const auto& [name, optimizer] : all) {
      const auto before = adamw.state(0, 0).exp_avg.clone();
      TrainingState state(net, optimizer);
      const auto text = testing::error_of([&] { load(state, path + saved, *alone); });
      EXPECT_EQ(text == "no Error", saved == name) << saved << " into " << name << ": " << text;
      const bool is_decay = saved.starts_with("Adam") && name.starts_with("Adam");
      const auto* reason = is_decay ? "decoupled_weight_decay" : "make the one that was saved";
      EXPECT_EQ(text.find(reason) != std::string::npos, saved != name)
          << saved << " into " << name << ": " << text;
      EXPECT_TRUE(torch::equal(adamw.state(0, 0).exp_avg, before)) << saved << " into " << name;
    }
  }
}

// What each rank has for itself: as many ranks get their own back, others by a stated rule.
TEST(TrainingState, HasValuesOfEachRank) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(3, [&](Mesh& mesh) {
    auto net = make_net({});
    shard(net, Way::rows, mesh);
    AdamW optimizer(sharded_parameters(net));
    TrainingState state(net, optimizer);
    state.values.set_item("step", 7);
    state.rank_values.set_item("place", 10 * mesh.rank());
    state.rank_values.set_item("rng", leaf_of(torch::full({5}, mesh.rank(), torch::kByte)));
    save(state, path, mesh.checkpoint_group());
  });
  for (const int world : {3, 2, 4, 1}) {
    const testing_support::Warnings warnings;
    run_mesh(world, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, Way::rows, mesh);
      AdamW optimizer(sharded_parameters(net));
      TrainingState state(net, optimizer);
      state.values.set_item("step", 0);
      state.rank_values.set_item("place", -1);
      state.rank_values.set_item("rng", leaf_of(torch::full({5}, 99, torch::kByte)));
      load(state, path, mesh.checkpoint_group());
      EXPECT_EQ(state.values.at("step").as_int(), 7);
      const bool was_there = mesh.rank() < 3;
      EXPECT_EQ(state.rank_values.at("place").as_int(), was_there ? 10 * mesh.rank() : -1);
      const auto rng = tensor_of(state.rank_values.at("rng").as_tensor());
      EXPECT_TRUE(torch::all(rng == (was_there ? mesh.rank() : 99)).item<bool>()) << world;
    });
    const auto text = "values of 3 ranks are loaded by " + std::to_string(world);
    EXPECT_EQ(std::ranges::any_of(
                  warnings.texts(),
                  [&](const auto& warning) { return warning.find(text) != std::string::npos; }),
              world != 3);
  }
}

// An empty dict and a none stand for all that lies at their place, on every rank.
TEST(TrainingState, TakesWholeSubtreesInThePlaceOfNothing) {
  const TemporaryDirectory directory;
  const auto filled = [](int rank) {
    auto inner = Value::dict({{"depth", 3}, {"table", leaf_of(torch::full({5}, rank + 2))}});
    return Value::dict({{"lr", 0.5}, {"inner", inner}, {"list", Value::list({inner, 4})}});
  };
  const auto is_filled = [&](const Value& got, int rank) {
    const auto table = tensor_of(got.at("inner").at("table").as_tensor());
    return got == filled(rank) && torch::all(table == rank + 2).item<bool>();
  };
  for (const std::string key : {"", "all"}) {
    const auto path = directory.path() + "/saved" + key;
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, Way::rows, mesh);
      AdamW optimizer(sharded_parameters(net));
      TrainingState state(net, optimizer);
      state.key = key;
      state.values = Value::dict({{"a", filled(0)},
                                  {"b", filled(0)},
                                  {"c", Value::dict({{"d", filled(0)}})},
                                  {"nothing", Value::dict()},
                                  {"none", Value()}});
      state.rank_values = Value::dict({{"own", filled(mesh.rank())}});
      save(state, path, mesh.checkpoint_group());
      state.values = Value::dict({{"a", Value()},
                                  {"b", Value::dict()},
                                  {"c", Value::dict({{"d", Value::dict()}})},
                                  {"nothing", Value::dict()},
                                  {"none", Value()}});
      state.rank_values = Value::dict({{"own", Value::dict()}});
      load(state, path, mesh.checkpoint_group());
      for (const Value& got :
           {state.values.at("a"), state.values.at("b"), state.values.at("c").at("d")})
        EXPECT_TRUE(is_filled(got, 0)) << key;
      EXPECT_EQ(state.values.at("nothing"), Value::dict());
      EXPECT_TRUE(state.values.at("none").is(Value::Kind::none));
      EXPECT_TRUE(is_filled(state.rank_values.at("own"), mesh.rank()));
      state.values = Value::dict({{"absent", Value()}});
      EXPECT_EQ(testing::error_of([&] { load(state, path, mesh.checkpoint_group()); }).substr(0, 9),
                "not_found");
    });
  }
}

// Also below keys that are no strings and in lists, of a file that keeps the types of keys and of
// one that has only names.
TEST(TrainingState, TakesSubtreesBelowAnyStep) {
  const TemporaryDirectory directory;
  const auto alone = solo_group();
  auto net = make_net({});
  const auto dict_of = [](std::vector<Value::Pair> pairs) { return Value::dict(std::move(pairs)); };
  const auto filled = [&](int number) {
    return dict_of({{"lr", number}, {"inner", dict_of({{Value(3), number + 0.5}})}});
  };
  const auto nothing = Value::dict();
  const auto values = [&](bool has_names_alone, const auto& at) {
    const auto key = [&](int k) { return has_names_alone ? Value(std::to_string(k)) : Value(k); };
    return dict_of({{key(7), at(1)},
                    {"deep", dict_of({{key(1), at(2)}, {key(2), dict_of({{"x", at(3)}})}})},
                    {"list", Value::list({at(4), Value(4)})},
                    {"lists", Value::list({Value::list({at(5)}), at(6)})},
                    {"beside", Value::list({at(7), leaf_of(torch::ones({2}))})}});
  };
  const auto inner_of_strings = [&](int number) {
    return dict_of({{"lr", number}, {"inner", dict_of({{"3", number + 0.5}})}});
  };
  for (const std::string name : {"dcp", "file.pt", "names"}) {
    const auto path = directory.path() + "/" + name;
    const bool has_names_alone = name == "names";
    TrainingState state(net);
    state.values = has_names_alone ? values(true, inner_of_strings) : values(false, filled);
    save(state, path, *alone);
    for (const auto& placeholder : {Value::dict(), Value()}) {
      const bool is_none = placeholder.is(Value::Kind::none);
      state.values = values(false, [&](int number) {
        // A list of nones is a value like any other.
        return is_none && (number == 4 || number == 5) ? nothing : placeholder;
      });
      load(state, path, *alone);
      const auto expected =
          has_names_alone ? values(false, inner_of_strings) : values(false, filled);
      for (const auto& [key, value] : expected.pairs()) {
        if (key == Value("beside")) continue;  // tensors are nodes
        EXPECT_EQ(*state.values.find_key(key), value) << name << " " << is_none;
      }
      EXPECT_EQ(state.values.at("beside").items()[0], expected.at("beside").items()[0]) << name;
    }
  }
  // A key and its text are two.
  TrainingState state(net);
  state.values = dict_of({{"both", dict_of({{Value(1), filled(1)}, {"1", filled(2)}})}});
  save(state, directory.path() + "/both.pt", *alone);
  const auto both = state.values.at("both");
  for (const auto& [key, value] : both.pairs()) {
    state.values = dict_of({{"both", dict_of({{key, nothing}})}});
    load(state, directory.path() + "/both.pt", *alone);
    EXPECT_EQ(*state.values.at("both").find_key(key), value);
  }
}

// A tensor of the program's is filled where it is, and nothing is put in its place.
TEST(TrainingState, FillsTheTensorsAmongItsValues) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({});
    shard(net, Way::rows, mesh);
    TrainingState state(net);
    const auto ema = torch::full({3, 2}, 5.0), own = torch::full({2}, mesh.rank() + 1.0);
    state.values.set_item("ema", to_value(ema.t()));
    state.rank_values.set_item("own", to_value(own));
    save(state, path, mesh.checkpoint_group());
    ema.zero_();
    own.zero_();
    load(state, path, mesh.checkpoint_group());
    EXPECT_TRUE(torch::equal(ema, torch::full({3, 2}, 5.0)));
    EXPECT_TRUE(torch::equal(own, torch::full({2}, mesh.rank() + 1.0)));
    EXPECT_EQ(to_tensor(state.values.at("ema")).const_data_ptr(), ema.const_data_ptr());
    // Another dtype is cast to, another shape is refused.
    const auto exact = torch::zeros({2, 3}, at::kDouble);
    state.values.set_item("ema", to_value(exact));
    load(state, path, mesh.checkpoint_group());
    EXPECT_TRUE(torch::equal(exact, torch::full({2, 3}, 5.0, at::kDouble)));
    state.values.set_item("ema", to_value(torch::zeros({2, 4})));
    EXPECT_EQ(testing::error_of([&] { load(state, path, mesh.checkpoint_group()); }).substr(0, 8),
              "mismatch");
    // In the place of nothing the tensor has memory of its own.
    state.values.set_item("ema", Value());
    load(state, path, mesh.checkpoint_group());
    EXPECT_TRUE(torch::equal(to_tensor(state.values.at("ema")), ema.t()));
    EXPECT_NE(to_tensor(state.values.at("ema")).const_data_ptr(), ema.const_data_ptr());
  });
}

// A model that grows a head, with a group of its own.
struct GrowingImpl : torch::nn::Module {
  torch::nn::Linear body{nullptr}, head{nullptr};
  explicit GrowingImpl(bool has_head) {
    body = register_module("body", torch::nn::Linear(4, 4));
    if (has_head) head = register_module("head", torch::nn::Linear(4, 2));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = body(x).tanh();
    return head ? head(y) : y;
  }
};
TESSERA_MODULE(Growing);

std::vector<ParameterGroup> groups_of(Growing& net, double lr) {
  std::vector<ParameterGroup> groups(net->head ? 2 : 1, {{}, {.lr = lr}});
  for (const auto& parameter : sharded_parameters(net)) {
    const bool is_of_head = parameter.name().starts_with("head");
    groups[is_of_head ? 1 : 0].parameters.push_back(parameter);
  }
  return groups;
}

int steps_of(const AdamW& optimizer, std::size_t group) {
  const auto& state = optimizer.state(group, 0);
  return state.defined() ? state.step.item<int>() : 0;
}

// 47, 4.3: what a checkpoint lacks begins afresh where the caller has said so, and is reported.
TEST(TrainingState, BeginsNewLayersAndGroupsAfresh) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    const auto train = [](Growing& net, AdamW& optimizer) {
      net(torch::ones({2, 4})).square().sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    Growing before(false), grown(true);
    fully_shard(before, mesh);
    fully_shard(grown, mesh);
    AdamW one(groups_of(before, 0.25)), two(groups_of(grown, 0.5));
    train(before, one);
    save(TrainingState(before, one), path, mesh.checkpoint_group());
    TrainingState state(grown, two);
    EXPECT_NE(testing::error_of([&] {
                load(state, path, mesh.checkpoint_group());
              }).find("the checkpoint's optimizer has 1 groups, this one 2"),
              std::string::npos);
    for (const bool has_trained : {false, true}) {
      if (has_trained) train(grown, two);
      const auto report =
          load(state, path, {.missing = OnDifference::report}, mesh.checkpoint_group());
      for (const std::string name : {"model.head.weight", "optim.state.head.weight",
                                     "optim.state.head.bias", "optim.param_groups.1.lr"})
        EXPECT_TRUE(std::ranges::binary_search(report.missing, name)) << name;
      EXPECT_EQ(two.options(0).lr, 0.25);
      EXPECT_EQ(two.options(1).lr, 0.5);
      EXPECT_TRUE(torch::equal(two.state(0, 0).exp_avg, one.state(0, 0).exp_avg));
      EXPECT_EQ(steps_of(two, 0), 1);
      EXPECT_EQ(steps_of(two, 1), 0);
    }
    train(grown, two);
    EXPECT_EQ(steps_of(two, 0), 2);
    EXPECT_EQ(steps_of(two, 1), 1);
    // Options go by the numbers of groups: another order would swap the rates without a word.
    auto turned = groups_of(grown, 0.5);
    std::swap(turned[0], turned[1]);
    AdamW three(std::move(turned));
    TrainingState other(grown, three);
    EXPECT_EQ(testing::error_of([&] {
                load(other, path, {.missing = OnDifference::report}, mesh.checkpoint_group());
              }).substr(0, 8),
              "mismatch");
    EXPECT_EQ(three.options(0).lr, 0.5);
  });
}

// Two groups, the rates of which a warm-up and a cosine set, and a rate that falls on a plateau.
struct ScheduledTraining {
  explicit ScheduledTraining(const Mesh& mesh, double lr = 0.1) {
    shard(net, Way::rows, mesh);
    auto all = sharded_parameters(net);
    const auto half = all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2);
    optimizer.emplace(std::vector<ParameterGroup>{{{all.begin(), half}, {.lr = lr}},
                                                  {{half, all.end()}, {.lr = lr / 4}}});
    scheduler.emplace(*optimizer, SequentialLR{{LinearLR{.start_factor = 0.25, .total_iters = 3},
                                                CosineAnnealingLR{.t_max = 6}},
                                               {3}});
    state.emplace(net, *optimizer);
  }
  // The rates of each step.
  std::vector<double> steps(int count) {
    std::vector<double> rates;
    for (int step = 0; step < count; ++step) {
      for (const double rate : scheduler->get_last_lr()) rates.push_back(rate);
      optimizer->zero_grad();
      loss_of(net, testing::batch(step, 0, 1)).backward();
      optimizer->step();
      scheduler->step();
    }
    return rates;
  }

  testing::Net net = make_net({});
  std::optional<AdamW> optimizer;
  std::optional<LRScheduler> scheduler;
  std::optional<TrainingState> state;
};

TEST(TrainingState, TakesTheSchedulerAlong) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  std::vector<double> expected;
  run_mesh(2, [&](Mesh& mesh) {
    ScheduledTraining training(mesh);
    static_cast<void>(training.steps(5));
    ReduceLROnPlateau plateau(*training.optimizer, {.patience = 3});
    plateau.step(0.5);
    training.state->values["lr_scheduler"] = training.scheduler->state_dict();
    training.state->values["plateau"] = plateau.state_dict();
    save(*training.state, path, mesh.checkpoint_group());
    const auto rates = training.steps(3);
    if (mesh.rank() == 0) expected = rates;
  });
  for (const int ranks : {1, 2, 3}) {
    run_mesh(ranks, [&](Mesh& mesh) {
      ScheduledTraining training(mesh, 0.7);
      ReduceLROnPlateau plateau(*training.optimizer);
      training.state->values["lr_scheduler"] = training.scheduler->state_dict();
      training.state->values["plateau"] = plateau.state_dict();
      load(*training.state, path, mesh.checkpoint_group());
      training.scheduler->load_state_dict(training.state->values["lr_scheduler"]);
      plateau.load_state_dict(training.state->values["plateau"]);
      EXPECT_EQ(training.scheduler->last_epoch(), 5);
      EXPECT_EQ(training.scheduler->base_lrs(), (std::vector{0.1, 0.025}));
      EXPECT_EQ(training.steps(3), expected) << ranks;
      EXPECT_EQ(plateau.state_dict().at("best").as_real(), 0.5);
      EXPECT_EQ(plateau.state_dict().at("patience").as_int(), 3);
    });
  }
}

TEST(TrainingState, RefusesTensorsOfWhichOneWouldStandForAll) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({});
    shard(net, Way::rows, mesh);
    AdamW optimizer(sharded_parameters(net));
    TrainingState state(net, optimizer);
    state.values.set_item("same", leaf_of(torch::ones({3})));
    auto rng = Value::dict();
    rng.set_item("torch", leaf_of(torch::full({5}, mesh.rank(), torch::kByte)));
    state.values.set_item("rng", rng);
    const auto text = testing::error_of([&] { save(state, path, mesh.checkpoint_group()); });
    EXPECT_NE(text.find("rank_values"), std::string::npos) << text;
    EXPECT_NE(text.find("rng.torch"), std::string::npos) << text;
    EXPECT_FALSE(std::filesystem::exists(path));
    state.values.erase("rng");
    // One memory that is another tensor on each rank, as bits beside it say.
    const auto memory = torch::complex(torch::ones({3}), torch::ones({3}));
    state.values.set_item("bits", to_value(mesh.rank() == 0 ? memory : memory.conj()));
    EXPECT_NE(testing::error_of([&] { save(state, path, mesh.checkpoint_group()); }).find("bits"),
              std::string::npos);
    state.values.erase("bits");
    // Parts of one tensor are each rank's own.
    state.values.set_item("parts",
                          sharded_leaf_of(torch::full({2}, mesh.rank()), {4}, 2 * mesh.rank()));
    EXPECT_NO_THROW(save(state, path, mesh.checkpoint_group()));
  });
}

}  // namespace
}  // namespace tessera
