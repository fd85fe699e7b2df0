// Training states of several models and optimizers, of optimizers in backward, without a group, and
// in memory: each goes on as the training that was never interrupted.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/testing.h"
#include "tessera/error.h"
#include "tessera/optimizer_in_backward.h"
#include "tessera/snapshot.h"
#include "tessera/training_state.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::error_of;
using testing::expect_losses;
using testing::half_net;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

constexpr int kSteps = 3;
constexpr Way kWays[] = {Way::replicated, Way::rows, Way::flat, Way::original};

// Steps from `first` on; `backward` ends in a step.
std::vector<double> losses_of(Net& net, int first, const std::function<void()>& zero_grad,
                              const std::function<void()>& step) {
  std::vector<double> losses;
  for (int s = first; s < first + kSteps; ++s) {
    zero_grad();
    auto loss = loss_of(net, testing::batch(s, 0, 1));
    loss.backward();
    step();
    losses.push_back(loss.item<double>());
  }
  return losses;
}
template <typename Optimizer>
std::vector<double> train(Net& net, Optimizer& optimizer, int first) {
  return losses_of(
      net, first, [&] { optimizer.zero_grad(); }, [&] { optimizer.step(); });
}

// Two models that are trained apart, as a GAN's, each with an optimizer of another type.
struct Pair {
  Pair(const Mesh& mesh, Way way, const std::function<Net()>& make) : one(make()), two(make()) {
    shard(one, way, mesh);
    shard(two, way, mesh);
    adam.emplace(sharded_parameters(one), AdamWOptions{.lr = 0.01});
    sgd.emplace(local_tensors(sharded_parameters(two)), testing::sgd_options());
    state.emplace(one, *adam);
    state->values.set_item("step", 0);
    auto& other = state->others.emplace_back(two, *sgd);
    other.key = "discriminator";
    other.values.set_item("updates", 0);
  }
  std::vector<double> steps(int first) {
    auto losses = train(one, *adam, first);
    for (const auto loss : train(two, *sgd, first)) losses.push_back(loss);
    return losses;
  }

  Net one, two;
  std::optional<AdamW> adam;
  std::optional<torch::optim::SGD> sgd;
  std::optional<TrainingState> state;
};

TEST(SeveralModels, GoOnElsewhere) {
  const Mesh alone;
  for (const auto way : kWays) {
    Pair pair(alone, Way::whole, [] { return make_net({}); });
    (void)pair.steps(0);
    const auto expected = pair.steps(kSteps);
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    run_mesh(2, [&](Mesh& mesh) {
      Pair trained(mesh, way, [] { return make_net({}); });
      (void)trained.steps(0);
      trained.state->values.set_item("step", kSteps);
      trained.state->others[0].values.set_item("updates", 5);
      trained.state->others[0].rank_values.set_item("place", mesh.rank());
      save(*trained.state, path, mesh.checkpoint_group());
    });
    const auto checkpoint = Checkpoint::open(path);
    for (const auto* name : {"model.embed.weight", "optim.state.embed.weight.exp_avg", "step",
                             "discriminator.model.embed.weight", "discriminator.updates",
                             "discriminator.optim.state.embed.weight.momentum_buffer"})
      EXPECT_NE(checkpoint.find(name), nullptr) << name;
    for (const int world : {1, 2, 3}) {
      run_mesh(world, [&](Mesh& mesh) {
        Pair loaded(mesh, way, [] { return half_net(); });
        auto& other = loaded.state->others[0];
        other.rank_values.set_item("place", -1);
        load(*loaded.state, path, mesh.checkpoint_group());
        EXPECT_EQ(loaded.state->values.at("step").as_int(), kSteps);
        EXPECT_EQ(other.values.at("updates").as_int(), 5);
        EXPECT_EQ(other.rank_values.at("place").as_int(), mesh.rank() < 2 ? mesh.rank() : -1);
        expect_losses(loaded.steps(kSteps), expected);
      });
    }
  }
}

// One of them is loaded from what both have saved, and lies below the key of the other.
TEST(SeveralModels, AreEachAStateOfItsOwn) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const Mesh alone;
  Pair pair(alone, Way::whole, [] { return make_net({}); });
  (void)pair.steps(0);
  pair.state->key = "gan";
  save(*pair.state, path);
  const auto expected = train(pair.two, *pair.sgd, kSteps);
  auto net = half_net();
  torch::optim::SGD sgd(net->parameters(), 0.7);
  TrainingState outer(net), inner(net, sgd);
  inner.key = "discriminator";
  outer.key = "gan";
  EXPECT_NE(error_of([&] { load(inner, path); }).find("not_found"), std::string::npos);
  // The outer one has no optimizer and no values: what it does not ask for stays.
  auto beside = half_net();
  TrainingState holder(beside);
  holder.key = "gan";
  holder.others.push_back(inner);
  load(holder, path);
  expect_losses(train(net, sgd, kSteps), expected);
}

TEST(SeveralModels, NeedKeysOfTheirOwn) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const Mesh alone;
  Pair pair(alone, Way::whole, [] { return make_net({}); });
  auto& other = pair.state->others[0];
  for (const std::string key : {"", "model", "optim", "rank_values", "step"}) {
    other.key = key;
    for (const auto& text :
         {error_of([&] { save(*pair.state, path); }), error_of([&] { Snapshot{*pair.state}; })})
      EXPECT_EQ(text.substr(0, 16), "invalid_argument") << key << ": " << text;
  }
  other.key = "other";
  pair.state->others.push_back(other);
  EXPECT_EQ(error_of([&] { save(*pair.state, path); }).substr(0, 16), "invalid_argument");
  EXPECT_FALSE(std::filesystem::exists(path));
}

// OLMo's kinds have one model under no key, and ranks that have different models save nothing.
TEST(SeveralModels, AreRefusedWhereTheyHaveNoPlace) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    Pair pair(mesh, Way::flat, [] { return make_net({}); });
    for (const auto kind : {CheckpointKind::olmo_torch_new, CheckpointKind::olmo_legacy}) {
      EXPECT_EQ(error_of([&] { save(*pair.state, path, {.kind = kind}); }).substr(0, 11),
                "unsupported");
      TrainingState one(pair.one, *pair.adam);
      one.key = "app";
      const auto text = error_of([&] { save(one, path, {.kind = kind}); });
      EXPECT_EQ(text.substr(0, 11), "unsupported") << text;
      EXPECT_NE(text.find("TrainingState::key"), std::string::npos) << text;
    }
    if (mesh.rank() == 1) pair.state->others.clear();
    const auto text = error_of([&] { save(*pair.state, path); });
    EXPECT_EQ(text.substr(0, 8), "mismatch") << text;
    EXPECT_NE(text.find("others"), std::string::npos) << text;
  });
  EXPECT_FALSE(std::filesystem::exists(path));
}

// The error names the state whose keys differ.
TEST(SeveralModels, AreNamedByTheirErrors) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto alone = solo_group();
  Pair pair(Mesh(), Way::whole, [] { return make_net({}); });
  (void)pair.steps(0);
  save(*pair.state, path, *alone);
  const auto key_named_by = [](const auto& work) -> std::string {
    try {
      work();
    } catch (const Error& error) {
      return error.key();
    }
    return "no Error";
  };
  const auto with = [&](const OptimizerRef& optimizer) {
    TrainingState state(pair.one, *pair.adam);
    state.others.emplace_back(pair.two, optimizer).key = "discriminator";
    return state;
  };
  const auto key_of_load = [&](const OptimizerRef& optimizer) {
    auto state = with(optimizer);
    return key_named_by([&] { load(state, path, *alone); });
  };
  const auto key_of_save = [&](const TrainingState& state) {
    return key_named_by([&] { save(state, path + "2", *alone); });
  };
  // Other groups, another optimizer, one of another model.
  torch::optim::SGD few(pair.two->head->parameters(), testing::sgd_options());
  torch::optim::RMSprop other(pair.two->parameters(), 0.1);
  torch::optim::SGD foreign(pair.one->parameters(), testing::sgd_options());
  EXPECT_EQ(key_of_load(few), "discriminator.param_groups.0.params");
  EXPECT_EQ(key_of_load(other), "discriminator.param_groups");
  EXPECT_EQ(key_of_load(foreign), "discriminator");
  EXPECT_EQ(key_of_save(with(foreign)), "discriminator");
  auto state = with(*pair.sgd);
  state.key = "gan";
  state.others[0].values.set_item("model", 1);
  EXPECT_EQ(key_of_save(state), "gan.discriminator.model");
  EXPECT_EQ(key_named_by([&] { (void)Snapshot(state); }), "gan.discriminator.model");
}

// A failed load leaves the optimizers of all states as they were.
TEST(SeveralModels, AFailedLoadLeavesAllOptimizers) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const Mesh alone;
  Pair pair(alone, Way::whole, [] { return make_net({}); });
  save(*pair.state, path);  // before a step: without state
  (void)pair.steps(0);
  pair.state->others[0].values.set_item("not there", 1);
  EXPECT_EQ(error_of([&] { load(*pair.state, path); }).substr(0, 9), "not_found");
  EXPECT_TRUE(pair.adam->state(0, 0).defined());
  EXPECT_FALSE(pair.sgd->state().empty());
}

// Two optimizers of one model.
struct Split {
  explicit Split(Net& net) {
    auto parameters = sharded_parameters(net);
    // A unit's parameters stay together: they may be one.
    const auto blocks = std::ranges::stable_partition(
        parameters, [](const auto& parameter) { return !parameter.name().starts_with("block"); });
    const auto all = local_tensors(parameters);
    const auto middle = all.end() - static_cast<std::ptrdiff_t>(blocks.size());
    adam.emplace(std::vector(all.begin(), middle), torch::optim::AdamOptions(0.01));
    sgd.emplace(std::vector(middle, all.end()), testing::sgd_options());
  }
  void step() {
    adam->step();
    sgd->step();
  }
  void zero_grad() {
    adam->zero_grad();
    sgd->zero_grad();
  }
  [[nodiscard]] OptimizerRef ref() { return OptimizerRef::several({*adam, *sgd}); }

  std::optional<torch::optim::Adam> adam;
  std::optional<torch::optim::SGD> sgd;
};

TEST(SeveralOptimizers, AreOneStateWhoseGroupsFollowOneAnother) {
  for (const auto way : kWays) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    std::vector<double> expected;
    run_mesh(2, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, way, mesh);
      Split optimizers(net);
      (void)train(net, optimizers, 0);
      save(TrainingState(net, optimizers.ref()), path, mesh.checkpoint_group());
      const auto losses = train(net, optimizers, kSteps);
      if (mesh.rank() == 0) expected = losses;
    });
    const auto tree = Checkpoint::open(path).load();
    EXPECT_EQ(tree.at("optim").at("param_groups").size(), 2U);
    EXPECT_NE(tree.at("optim").at("param_groups").at(std::size_t{1}).find("momentum"), nullptr);
    for (const int world : {1, 2}) {
      run_mesh(world, [&](Mesh& mesh) {
        auto net = half_net();
        shard(net, way, mesh);
        Split optimizers(net);
        optimizers.sgd->param_groups()[0].options().set_lr(7);
        TrainingState state(net, optimizers.ref());
        // The parameters of a group differ by how FSDP1's flat ones begin: the same here.
        load(state, path, mesh.checkpoint_group());
        expect_losses(train(net, optimizers, kSteps), expected);
      });
    }
  }
}

TEST(SeveralOptimizers, HaveNoParameterInCommon) {
  auto net = make_net({});
  torch::optim::SGD one(net->parameters(), 0.1), two({net->parameters()[0]}, 0.1);
  EXPECT_EQ(error_of([&] {
              (void)OptimizerRef::several({one, two});
            }).substr(0, 16),
            "invalid_argument");
}

TEST(SeveralOptimizers, KeepNamesAndTakeGroupsThatComeLater) {
  auto net = make_net({});
  const auto all = net->parameters();
  torch::optim::SGD one({all[0]}, 0.1), two({all[1]}, 0.2);
  const auto ref = OptimizerRef::several({one, two});
  one.add_param_group(torch::optim::OptimizerParamGroup(std::vector{all[2]}));
  const auto groups = optimizer_state_dict(ref).at("param_groups");
  ASSERT_EQ(groups.size(), 3U);
  EXPECT_EQ(groups.at(std::size_t{2}).at("lr").as_real(), 0.2);
  OptimizerRef::Names names;
  for (std::size_t i = 0; i < 3; ++i) names[all[i].unsafeGetTensorImpl()] = std::to_string(i);
  const auto shared = std::make_shared<const OptimizerRef::Names>(names);
  const auto named =
      OptimizerRef::several({OptimizerRef(one).with_names(shared), OptimizerRef(two)});
  ASSERT_TRUE(named.is_named());
  EXPECT_EQ(named.keys()[2][0].key.as_string(), "1");
}

MakeOptimizer make_adam(double lr = 0.01) {
  return [lr](std::vector<torch::Tensor> parameters) {
    return std::make_unique<torch::optim::Adam>(std::move(parameters),
                                                torch::optim::AdamOptions(lr));
  };
}

// What is saved of optimizers in backward loads into an ordinary one, and the reverse.
TEST(OptimizerInBackward, HasTheStateOfAnOrdinaryOne) {
  for (const auto way : {Way::rows, Way::original, Way::whole}) {
    for (const bool is_saved_in_backward : {true, false}) {
      const TemporaryDirectory directory;
      const auto path = directory.path() + "/saved";
      std::vector<double> expected;
      const auto carry_out = [&](const Mesh& mesh, bool in_backward, Net net, double lr, int first,
                                 const std::function<void(TrainingState&)>& before,
                                 const std::function<void(TrainingState&)>& after) {
        shard(net, way, mesh);
        const auto parameters = sharded_parameters(net);
        if (in_backward) {
          apply_optimizer_in_backward(parameters, make_adam(lr));
          TrainingState state(net, optimizer_in_backward(parameters));
          before(state);
          const auto losses = losses_of(
              net, first, [] {}, [] {});
          after(state);
          return losses;
        }
        torch::optim::Adam adam(local_tensors(parameters), torch::optim::AdamOptions(lr));
        TrainingState state(net, adam);
        before(state);
        const auto losses = train(net, adam, first);
        after(state);
        return losses;
      };
      const auto nothing = [](TrainingState&) {};
      const auto loading = [&](TrainingState& state) { load(state, path); };
      run_mesh(2, [&](Mesh& mesh) {
        (void)carry_out(mesh, is_saved_in_backward, make_net({}), 0.01, 0, nothing,
                        [&](TrainingState& state) {
                          if (way != Way::whole || mesh.rank() == 0) save(state, path);
                        });
      });
      for (const bool in_backward : {true, false}) {
        run_mesh(2, [&](Mesh& mesh) {
          const auto losses =
              carry_out(mesh, in_backward, half_net(), 0.7, kSteps, loading, nothing);
          if (mesh.rank() != 0) return;
          if (expected.empty()) {
            expected = losses;
          } else {
            expect_losses(losses, expected);
          }
        });
      }
      Net net = make_net({});
      torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.01));
      (void)train(net, adam, 0);
      expect_losses(expected, train(net, adam, kSteps));
    }
  }
}

TEST(OptimizerInBackward, WorksOnWhatTheParameterIs) {
  torch::nn::Linear linear(3, 3);
  const auto parameters = sharded_parameters(linear);
  EXPECT_EQ(error_of([&] {
              apply_optimizer_in_backward(parameters, [](std::vector<torch::Tensor> given) {
                return std::make_unique<torch::optim::SGD>(std::vector{given[0].detach()}, 0.1);
              });
            }).substr(0, 16),
            "invalid_argument");
  apply_optimizer_in_backward(parameters, make_adam());
  linear->to(torch::kDouble);
  const auto ref = optimizer_in_backward(parameters);
  const auto state = Value::dict({{"step", 1},
                                  {"exp_avg", leaf_of(torch::ones({3, 3}, torch::kDouble))},
                                  {"exp_avg_sq", leaf_of(torch::ones({3, 3}, torch::kDouble))}});
  ref.access().set_state(parameters[0].local, state, false);
  EXPECT_EQ(ref.access().state(parameters[0].local).at("exp_avg").as_tensor().dtype,
            DType::float64);
}

TEST(OptimizerInBackward, IsMissingWhereNoneWasGiven) {
  auto net = make_net({});
  EXPECT_EQ(error_of([&] { (void)optimizer_in_backward(sharded_parameters(net)); }).substr(0, 16),
            "invalid_argument");
  // Groups are those of equal options.
  const auto parameters = sharded_parameters(net);
  apply_optimizer_in_backward({parameters.begin(), parameters.begin() + 2}, make_adam(0.5));
  apply_optimizer_in_backward({parameters.begin() + 2, parameters.end()}, make_adam(0.25));
  const auto ref = optimizer_in_backward(parameters);
  ASSERT_EQ(ref.keys().size(), 2U);
  EXPECT_EQ(ref.keys()[0].size(), 2U);
  EXPECT_EQ(ref.access().group(1).at("lr").as_real(), 0.25);
}

// Without a group a sharded model's ranks save and load together, and a whole one alone.
TEST(TrainingState, NeedsNoGroup) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  std::vector<double> expected;
  for (const int world : {2, 1, 3}) {
    run_mesh(world, [&](Mesh& mesh) {
      auto net = make_net({});
      shard(net, Way::rows, mesh);
      AdamW optimizer(sharded_parameters(net), {.lr = 0.01});
      TrainingState state(net, optimizer);
      if (expected.empty()) {
        (void)train(net, optimizer, 0);
        EXPECT_EQ(save(state, path).save_id.empty(), false);
        mesh.group().barrier();
      } else {
        load(state, path);
      }
      const auto losses = train(net, optimizer, kSteps);
      if (!expected.empty()) return expect_losses(losses, expected);
      mesh.group().barrier();
      if (mesh.rank() == 0) expected = losses;
    });
  }
  auto net = half_net();
  AdamW optimizer(sharded_parameters(net), {.lr = 0.5});
  TrainingState state(net, optimizer);
  load(state, path, {.missing = OnDifference::report});
  expect_losses(train(net, optimizer, kSteps), expected);
}

// A model of which some parameters are on half of the ranks: all ranks save, not that half.
TEST(TrainingState, IsSavedByTheMostRanksThatShareAUnit) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(4, [&](Mesh& mesh) {
    torch::nn::Linear expert(4, 4), common(4, 4);
    torch::nn::Sequential net(expert, common);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.fill_(0.5);
    }
    fully_shard(expert, mesh.split(2).shard);
    fully_shard(common, mesh);
    TrainingState state(net);
    save(state, path, {.copies = IfDiffers::keep});
    load(state, path);
  });
}

// A rank that has only frozen parameters has an empty state, and others have none (FSDP1).
TEST(TrainingState, IsEmptyOnSomeRanksAlone) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    torch::nn::Sequential net(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4));
    for (auto& parameter : net->ptr(0)->parameters()) parameter.set_requires_grad(false);
    const FullyShardedDataParallel<torch::nn::Sequential> model(net, mesh,
                                                                {.use_orig_params = true});
    AdamW optimizer(model.parameters());
    call_module(net, torch::ones({1, 4})).sum().backward();
    optimizer.step();
    TrainingState state(net, optimizer);
    save(state, path);
    load(state, path);
  });
  EXPECT_EQ(Checkpoint::open(path).load().at("optim").at("state").size(), 2U);
}

TEST(Snapshot, GivesBackWhatItHasTaken) {
  for (const auto way : {Way::whole, Way::replicated, Way::rows, Way::flat, Way::original}) {
    for (const int world : {1, 3}) {
      run_mesh(world, [&](Mesh& mesh) {
        Pair pair(mesh, way, [] { return make_net({}); });
        pair.state->values.set_item("table", leaf_of(torch::full({2}, 3)));
        auto& other = pair.state->others[0];
        other.rank_values.set_item("place", mesh.rank());
        const Snapshot fresh(*pair.state);
        const auto first = pair.steps(0);
        pair.state->values.set_item("step", 7);
        pair.adam->set_lr(0.02);
        const Snapshot later(*pair.state);
        const auto second = pair.steps(kSteps);
        pair.adam->set_lr(5);
        pair.state->values.set_item("step", 99);
        pair.state->values.set_item("table", leaf_of(torch::full({2}, 8)));
        other.rank_values.set_item("place", -1);
        for (int again = 0; again < 2; ++again) {
          later.restore(*pair.state);
          EXPECT_EQ(pair.state->values.at("step").as_int(), 7);
          EXPECT_TRUE(torch::equal(tensor_of(pair.state->values.at("table").as_tensor()),
                                   torch::full({2}, 3)));
          EXPECT_EQ(other.rank_values.at("place").as_int(), mesh.rank());
          EXPECT_EQ(pair.adam->options(0).lr, 0.02);
          EXPECT_EQ(pair.steps(kSteps), second);
        }
        fresh.restore(*pair.state);
        EXPECT_FALSE(pair.adam->state(0, 0).defined());
        EXPECT_EQ(pair.steps(0), first);
      });
    }
  }
}

TEST(Snapshot, IsOfOneModel) {
  const Mesh alone;
  auto net = make_net({}), smaller = make_net({.blocks = 2});
  TrainingState state(net), other(smaller);
  const Snapshot snapshot(state);
  snapshot.restore(other);  // a part of it
  const Snapshot part(other);
  EXPECT_EQ(error_of([&] { part.restore(state); }).substr(0, 9), "not_found");
}

// A flat parameter has one state for all in it, of which the first may be new.
struct GrownImpl : torch::nn::Module {
  torch::nn::Linear head{nullptr}, body{nullptr};
  explicit GrownImpl(bool has_head) {
    if (has_head) head = register_module("head", torch::nn::Linear(4, 4));
    body = register_module("body", torch::nn::Linear(4, 4));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    const auto y = body(x).tanh();
    return head ? head(y) : y;
  }
};
TESSERA_MODULE(Grown);

TEST(TrainingState, OfAFlatParameterIsKeptWhereItsFirstMemberIsNew) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    Grown before(false), grown(true);
    const FullyShardedDataParallel<Grown> one(before, mesh, {.use_orig_params = false});
    const FullyShardedDataParallel<Grown> two(grown, mesh, {.use_orig_params = false});
    AdamW saved(one.parameters()), loaded(two.parameters());
    const auto step = [](Grown& net, AdamW& optimizer) {
      net(torch::ones({2, 4})).square().sum().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    step(before, saved);
    save(TrainingState(before, saved), path);
    TrainingState state(grown, loaded);
    for (const bool has_stepped : {false, true}) {
      if (has_stepped) step(grown, loaded);
      load(state, path, {.missing = OnDifference::report});
      const auto whole = full_optim_state_dict(grown, loaded);
      const auto expected = full_optim_state_dict(before, saved);
      if (mesh.rank() != 0) continue;
      const auto moment = [](const Value& of, const char* name) {
        return tensor_of(of.at("state").at(name).at("exp_avg").as_tensor()).clone();
      };
      EXPECT_TRUE(torch::equal(moment(whole, "body.weight"), moment(expected, "body.weight")));
      EXPECT_GT(moment(whole, "body.weight").abs().max().item<double>(), 0);
      EXPECT_EQ(moment(whole, "head.weight").abs().max().item<double>(), 0) << has_stepped;
    }
  });
}

}  // namespace
}  // namespace tessera
