// A training state is saved in one call and loaded in one: under any way of sharding, on any number
// of ranks and with any optimizer the training goes on as if it had never been interrupted.
#include "tessera/training_state.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/forwarding_group.h"
#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/testing.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/optimizer_in_backward.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::expect_losses;
using testing::half_net;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

constexpr int kSavedAfter = 3, kMoreSteps = 3;

enum class Kind { adam, sgd, adagrad, own };
std::string name_of(Kind kind) {
  constexpr const char* kNames[] = {"Adam", "Sgd", "Adagrad", "Own"};
  return kNames[static_cast<int>(kind)];
}

// Any of them under one name.
class Trainer {
 public:
  Trainer(Net net, Kind kind) : net_(std::move(net)) {
    const auto parameters = sharded_parameters(net_);
    const auto tensors = local_tensors(parameters);
    switch (kind) {
      case Kind::adam:
        torch_ = std::make_unique<torch::optim::Adam>(
            tensors, torch::optim::AdamOptions(0.01).amsgrad(true));
        break;
      case Kind::sgd:
        torch_ = std::make_unique<torch::optim::SGD>(
            tensors, torch::optim::SGDOptions(0.02).momentum(0.9).dampening(0.2));
        break;
      case Kind::adagrad:
        torch_ = std::make_unique<torch::optim::Adagrad>(tensors, 0.02);
        break;
      case Kind::own:
        own_.emplace(parameters, AdamWOptions{.lr = 0.01});
        break;
    }
  }

  std::vector<double> train(int first, int count) {
    std::vector<double> losses;
    for (int step = first; step < first + count; ++step) {
      net_->zero_grad();
      if (own_) own_->zero_grad();
      if (torch_) torch_->zero_grad();
      auto loss = loss_of(net_, testing::batch(step, 0, 1));
      loss.backward();
      losses.push_back(loss.item<double>());
      if (own_) own_->step();
      if (torch_) torch_->step();
    }
    return losses;
  }

  [[nodiscard]] OptimizerRef optimizer() {
    return own_ ? OptimizerRef(*own_) : OptimizerRef(*torch_);
  }
  [[nodiscard]] TrainingState state() { return {net_, optimizer()}; }
  [[nodiscard]] Net& net() { return net_; }
  void set_lr(double lr) {
    if (own_) return own_->set_lr(lr);
    torch_->param_groups()[0].options().set_lr(lr);
  }

 private:
  Net net_;
  std::unique_ptr<torch::optim::Optimizer> torch_;
  std::optional<AdamW> own_;
};

Trainer trainer_on(Net net, Way way, const Mesh& mesh, Kind kind) {
  shard(net, way, mesh);
  return {std::move(net), kind};
}

void save_trained(const std::string& path, Way way, int world, Kind kind) {
  run_mesh(world, [&](Mesh& mesh) {
    auto trainer = trainer_on(make_net({}), way, mesh, kind);
    trainer.train(0, kSavedAfter);
    auto state = trainer.state();
    state.values.set_item("step", kSavedAfter);
    save(state, path, mesh.checkpoint_group());
  });
}

// Counts how often ranks fold a message.
class FoldCounter final : public testing_support::ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  Bytes fold(Bytes mine, const Combine& combine) override {
    ++folds;
    return ForwardingGroup::fold(std::move(mine), combine);
  }

  int folds = 0;
};

template <typename Call>
ErrorCode code_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::io;
}

class TrainingStates : public ::testing::TestWithParam<std::tuple<Way, Way, Kind>> {};

TEST_P(TrainingStates, GoOnElsewhere) {
  const auto [from, to, kind] = GetParam();
  Trainer alone(make_net({}), kind);
  alone.train(0, kSavedAfter);
  const auto expected = alone.train(kSavedAfter, kMoreSteps);
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, from, 3, kind);
  for (const int world : {1, 2, 4}) {
    run_mesh(world, [&, to = to, kind = kind](Mesh& mesh) {
      auto trainer = trainer_on(half_net(), to, mesh, kind);
      trainer.set_lr(0.5);  // the checkpoint's counts
      auto state = trainer.state();
      state.values.set_item("step", 0);
      load(state, path, mesh.checkpoint_group());
      EXPECT_EQ(state.values.at("step").as_int(), kSavedAfter);
      expect_losses(trainer.train(kSavedAfter, kMoreSteps), expected);
    });
  }
}

const auto kFromAndTo =
    ::testing::Values(Way::replicated, Way::rows, Way::flat, Way::original, Way::aligned);
INSTANTIATE_TEST_SUITE_P(Ways, TrainingStates,
                         ::testing::Combine(kFromAndTo, kFromAndTo,
                                            ::testing::Values(Kind::adam, Kind::sgd, Kind::adagrad,
                                                              Kind::own)),
                         [](const auto& of) {
                           return testing::name_of(std::get<0>(of.param)) + "To" +
                                  testing::name_of(std::get<1>(of.param)) +
                                  name_of(std::get<2>(of.param));
                         });

// A run that goes on and loads an older checkpoint has state already: it is replaced in place.
TEST(TrainingState, ReplacesTheStateThatIsThere) {
  for (const auto kind : {Kind::adam, Kind::sgd, Kind::own}) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    run_mesh(2, [&](Mesh& mesh) {
      auto trainer = trainer_on(make_net({}), Way::rows, mesh, kind);
      trainer.train(0, kSavedAfter);
      auto state = trainer.state();
      save(state, path, mesh.checkpoint_group());
      const auto expected = trainer.train(kSavedAfter, kMoreSteps);
      load(state, path, mesh.checkpoint_group());
      expect_losses(trainer.train(kSavedAfter, kMoreSteps), expected);
    });
  }
}

// Before the first step there is no state, and a load makes there be none again.
TEST(TrainingState, OfAFreshOptimizerIsThatOfAFreshOptimizer) {
  for (const auto kind : {Kind::adam, Kind::sgd, Kind::own}) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    run_mesh(2, [&](Mesh& mesh) {
      auto trainer = trainer_on(make_net({}), Way::rows, mesh, kind);
      auto state = trainer.state();
      save(state, path, mesh.checkpoint_group());
      const auto expected = trainer.train(0, kMoreSteps);
      load(state, path, mesh.checkpoint_group());
      expect_losses(trainer.train(0, kMoreSteps), expected);
    });
  }
}

// Its state lies in lists, under the first parameter alone.
TEST(TrainingState, KeepsTheHistoryOfLbfgs) {
  const auto run = [](Net& net, torch::optim::LBFGS& optimizer) {
    std::vector<double> losses;
    for (int i = 0; i < kMoreSteps; ++i) {
      const auto closure = [&] {
        optimizer.zero_grad();
        auto loss = loss_of(net, testing::batch(0, 0, 1));
        loss.backward();
        return loss;
      };
      losses.push_back(optimizer.step(closure).item<double>());
    }
    return losses;
  };
  const torch::optim::LBFGSOptions options = torch::optim::LBFGSOptions(0.1).max_iter(3);
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto alone = solo_group();
  auto net = make_net({});
  torch::optim::LBFGS optimizer(net->parameters(), options);
  run(net, optimizer);
  save(TrainingState(net, optimizer), path, *alone);
  const auto expected = run(net, optimizer);
  auto other = half_net();
  torch::optim::LBFGS fresh(other->parameters(), options);
  TrainingState state(other, fresh);
  load(state, path, *alone);
  expect_losses(run(other, fresh), expected);
}

// Parameters that are frozen, in groups of their own, or that the optimizer does not have.
TEST(TrainingState, KeepsGroupsAndFrozenParameters) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto halves = [](Net& net, double first, double second) {
    const auto parameters = local_tensors(sharded_parameters(net));
    std::vector<torch::optim::OptimizerParamGroup> groups;
    for (std::size_t i = 0; i < 2; ++i) {
      std::vector<at::Tensor> part;
      // The last parameter is in no group.
      for (std::size_t p = i; p + 1 < parameters.size(); p += 2) part.push_back(parameters[p]);
      groups.emplace_back(part,
                          std::make_unique<torch::optim::SGDOptions>(
                              torch::optim::SGDOptions(i == 0 ? first : second).momentum(0.5)));
    }
    return std::make_unique<torch::optim::SGD>(groups, torch::optim::SGDOptions(0.5));
  };
  run_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({});
    net->parameters()[0].set_requires_grad(false);
    shard(net, Way::rows, mesh);
    auto optimizer = halves(net, 0.01, 0.02);
    testing::train(net, *optimizer, 0, kSavedAfter);
    save(TrainingState(net, *optimizer), path, mesh.checkpoint_group());
    const auto expected = testing::train(net, *optimizer, kSavedAfter, kMoreSteps);
    auto other = half_net();
    other->parameters()[0].set_requires_grad(false);
    shard(other, Way::rows, mesh);
    auto fresh = halves(other, 0.3, 0.4);
    TrainingState state(other, *fresh);
    load(state, path, mesh.checkpoint_group());
    EXPECT_NEAR(testing::train(other, *fresh, kSavedAfter, kMoreSteps), expected, 1e-6);
    EXPECT_EQ(fresh->param_groups()[1].options().get_lr(), 0.02);
  });
}

// Two steps with a frozen embedding, then two in the second of which it trains.
template <typename Optimizer>
std::vector<double> thaw(Net& net, Optimizer& optimizer, int first, int end) {
  std::vector<double> losses;
  for (int step = first; step < end; ++step) {
    for (auto& parameter : net->embed->parameters()) parameter.set_requires_grad(step >= 3);
    net->zero_grad();
    optimizer.zero_grad();
    auto loss = loss_of(net, testing::batch(step, 0, 1));
    loss.backward();
    optimizer.step();
    losses.push_back(loss.template item<double>());
  }
  return losses;
}

// As torch.optim: a frozen parameter is in its group, has no state, and trains when it is thawed.
TEST(TrainingState, OfAdamWHasFrozenParametersInTheirGroups) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = make_net({}), net = make_net({}), other = half_net();
    for (auto* one : {&alone, &net, &other}) (*one)->embed->weight.set_requires_grad(false);
    torch::optim::AdamW expected(alone->parameters(), torch::optim::AdamWOptions(0.01));
    shard(net, Way::rows, mesh);
    shard(other, Way::rows, mesh);
    AdamW optimizer(sharded_parameters(net), {.lr = 0.01, .weight_decay = 0.01});
    AdamW fresh(sharded_parameters(other), {.lr = 0.5});
    EXPECT_EQ(optimizer.parameters(0).size(), alone->parameters().size());
    expect_losses(thaw(net, optimizer, 0, 2), thaw(alone, expected, 0, 2));
    EXPECT_FALSE(optimizer.state(0, 0).defined());
    save(TrainingState(net, optimizer), path, mesh.checkpoint_group());
    const auto after = thaw(alone, expected, 2, 6);
    expect_losses(thaw(net, optimizer, 2, 6), after);
    TrainingState state(other, fresh);
    load(state, path, mesh.checkpoint_group());
    expect_losses(thaw(other, fresh, 2, 6), after);
  });
}

// They step in the backward, and take the state of an ordinary optimizer of all parameters.
TEST(OptimizerInBackward, HasFrozenParametersInItsGroups) {
  const TemporaryDirectory home;
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = make_net({}), net = half_net();
    for (auto* one : {&alone, &net}) (*one)->embed->weight.set_requires_grad(false);
    torch::optim::Adam ordinary(alone->parameters(), torch::optim::AdamOptions(0.01));
    shard(net, Way::rows, mesh);
    const auto parameters = sharded_parameters(net);
    apply_optimizer_in_backward(parameters, [](auto given) {
      return std::make_unique<torch::optim::Adam>(given, /*defaults=*/0.5);
    });
    (void)thaw(alone, ordinary, 0, 2);
    if (mesh.rank() == 0) save(TrainingState(alone, ordinary), home.path() + "/0", *solo_group());
    mesh.group().barrier();
    TrainingState state(net, optimizer_in_backward(parameters));
    load(state, home.path() + "/0", mesh.checkpoint_group());
    torch::optim::SGD within({torch::zeros({1})}, 1);  // the backward has stepped
    expect_losses(thaw(net, within, 2, 6), thaw(alone, ordinary, 2, 6));
  });
}

TEST(TrainingState, OfAModelAloneLoadsFromACheckpointWithMore) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, Way::rows, 2, Kind::own);
  auto expected = Trainer(make_net({}), Kind::own);
  expected.train(0, kSavedAfter);
  auto net = half_net();
  TrainingState state(net);
  const auto alone = solo_group();
  load(state, path, *alone);
  for (std::size_t i = 0; i < net->parameters().size(); ++i) {
    EXPECT_TRUE(torch::allclose(net->parameters()[i], expected.net()->parameters()[i], 1e-5, 1e-6))
        << i;
  }
}

// What `convert` makes of it is as good.
TEST(TrainingState, LoadsFromFilesOfOtherKinds) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, Way::rows, 3, Kind::adam);
  Trainer alone(make_net({}), Kind::adam);
  alone.train(0, kSavedAfter);
  const auto expected = alone.train(kSavedAfter, kMoreSteps);
  for (const std::string file : {"/state.pt", "/state.safetensors"}) {
    ConvertOptions how;
    how.to = file == "/state.pt" ? CheckpointKind::torch_file : CheckpointKind::safetensors;
    convert(path, directory.path() + file, how);
    run_mesh(2, [&](Mesh& mesh) {
      auto trainer = trainer_on(half_net(), Way::original, mesh, Kind::adam);
      auto state = trainer.state();
      state.values.set_item("step", 0);
      load(state, directory.path() + file, mesh.checkpoint_group());
      EXPECT_EQ(state.values.at("step").as_int(), kSavedAfter);
      expect_losses(trainer.train(kSavedAfter, kMoreSteps), expected);
    });
  }
}

// C04: each rank opened it for itself, and nobody compared.
TEST(TrainingState, IsLoadedFromOneSaveByAllRanks) {
  const TemporaryDirectory directory;
  for (const std::string name : {"/0", "/1"})
    save_trained(directory.path() + name, Way::rows, 2, Kind::adam);
  std::atomic<int> refused = 0;
  run_mesh(2, [&](Mesh& mesh) {
    auto trainer = trainer_on(half_net(), Way::rows, mesh, Kind::adam);
    auto state = trainer.state();
    const auto own = directory.path() + "/" + std::to_string(mesh.rank());
    const auto code = code_of([&] { load(state, own, mesh.checkpoint_group()); });
    if (code == ErrorCode::conflict) ++refused;
  });
  EXPECT_EQ(refused, 2);
}

// P-19: a file on a disk that rank 0 alone has.
TEST(TrainingState, LoadsWhatRankZeroAloneSees) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, Way::rows, 3, Kind::adam);
  ConvertOptions how;
  how.to = CheckpointKind::torch_file;
  convert(path, directory.path() + "/state.pt", how);
  Trainer alone(make_net({}), Kind::adam);
  alone.train(0, kSavedAfter);
  const auto expected = alone.train(kSavedAfter, kMoreSteps);
  run_mesh(2, [&](Mesh& mesh) {
    auto trainer = trainer_on(half_net(), Way::original, mesh, Kind::adam);
    auto state = trainer.state();
    state.values.set_item("step", 0);
    LoadOptions options;
    options.reader = LoadReader::rank_zero;
    load(state, mesh.rank() == 0 ? directory.path() + "/state.pt" : "/nowhere", options,
         mesh.checkpoint_group());
    EXPECT_EQ(state.values.at("step").as_int(), kSavedAfter);
    expect_losses(trainer.train(kSavedAfter, kMoreSteps), expected);
  });
}

TEST(TrainingState, LiesUnderTheKeyThatItIsGiven) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  const auto alone = solo_group();
  Trainer trainer(make_net({}), Kind::adam);
  trainer.train(0, kSavedAfter);
  auto state = trainer.state();
  state.key = "app";
  state.values.set_item("seed", 7);
  save(state, path, *alone);
  const auto checkpoint = Checkpoint::open(path);
  EXPECT_NE(checkpoint.find("app.seed"), nullptr);
  EXPECT_NE(checkpoint.find("app.optim.param_groups.0.lr"), nullptr);
  EXPECT_EQ(checkpoint.find("seed"), nullptr);
  const auto expected = trainer.train(kSavedAfter, kMoreSteps);
  Trainer other(half_net(), Kind::adam);
  auto loaded = other.state();
  loaded.key = "app";
  load(loaded, path, *alone);
  expect_losses(other.train(kSavedAfter, kMoreSteps), expected);
}

TEST(TrainingState, RefusesWhatIsNotItsOwn) {
  const auto alone = solo_group();
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  auto net = make_net({});
  auto stranger = make_net({});
  torch::optim::SGD foreign(stranger->parameters(), 0.1);
  const TrainingState wrong(net, foreign);
  EXPECT_EQ(code_of([&] { save(wrong, path, *alone); }), ErrorCode::invalid_argument);
  TrainingState taken(net);
  taken.values.set_item("optim", 1);
  EXPECT_EQ(code_of([&] { save(taken, path, *alone); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { load(taken, path, *alone); }), ErrorCode::not_found);
}

// The optimizer gets ready for the checkpoint's names before the load looks for others.
TEST(TrainingState, OtherNamesAreForAModelAlone) {
  const auto alone = solo_group();
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, Way::rows, 2, Kind::adam);
  LoadOptions options;
  int asked = 0;
  options.rename = [&asked](const std::string& key) {
    ++asked;
    return key;
  };
  Trainer trainer(make_net({}), Kind::adam);
  auto both = trainer.state();
  EXPECT_EQ(code_of([&] { load(both, path, options, *alone); }), ErrorCode::unsupported);
  EXPECT_EQ(asked, 0);
  auto net = make_net({});
  TrainingState model(net);
  const auto report = load(model, path, options, *alone);
  EXPECT_GT(asked, 0);
  EXPECT_FALSE(report.extra.empty());
}

// What a failed load leaves is what was there before.
TEST(TrainingState, AFailedLoadLeavesTheOptimizerAlone) {
  const auto alone = solo_group();
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_trained(path, Way::rows, 2, Kind::adam);
  for (const bool has_state : {false, true}) {
    auto net = make_net({});
    auto parameters = net->parameters();
    std::vector<torch::optim::OptimizerParamGroup> halves;
    halves.emplace_back(std::vector<at::Tensor>{parameters.begin(), parameters.begin() + 2});
    halves.emplace_back(std::vector<at::Tensor>{parameters.begin() + 2, parameters.end()});
    torch::optim::Adam grouped(halves, torch::optim::AdamOptions(0.01));
    TrainingState other_groups(net, grouped);
    EXPECT_EQ(code_of([&] { load(other_groups, path, *alone); }), ErrorCode::mismatch);

    Trainer trainer(make_net({}), Kind::adam);
    if (has_state) trainer.train(0, 1);
    const auto before = optimizer_state_dict(trainer.optimizer());
    auto state = trainer.state();
    state.values.set_item("epoch", 0);  // which the checkpoint lacks
    EXPECT_EQ(code_of([&] { load(state, path, *alone); }), ErrorCode::not_found);
    testing::expect_same(optimizer_state_dict(trainer.optimizer()), before);
    EXPECT_EQ(state.values.at("epoch").as_int(), 0);
  }
}

// All numbers of an optimizer's state, as they are now.
std::vector<torch::Tensor> numbers_of(Trainer& trainer) {
  std::vector<torch::Tensor> numbers;
  auto optimizer = trainer.optimizer();
  for (const auto& parameter : local_tensors(sharded_parameters(trainer.net()))) {
    if (parameter.numel() == 0) continue;
    const auto state = optimizer.access().state(parameter);
    for (const auto* key : {"step", "exp_avg", "exp_avg_sq"})
      numbers.push_back(tensor_of(state.at(key).as_tensor()).clone());
  }
  return numbers;
}

// A load forgets the state of a parameter if the checkpoint has none.
TEST(TrainingState, AFailedLoadLeavesTheMomentsOfAdamW) {
  for (const auto way : {Way::replicated, Way::rows, Way::flat}) {
    for (const bool is_trained : {false, true}) {
      const TemporaryDirectory directory;
      const auto path = directory.path() + "/saved";
      run_mesh(2, [&](Mesh& mesh) {
        auto& group = mesh.checkpoint_group();
        {
          auto saved = trainer_on(make_net({}), way, mesh, Kind::own);
          if (is_trained) saved.train(0, 1);
          save(saved.state(), path, group);
        }
        auto trainer = trainer_on(make_net({}), way, mesh, Kind::own);
        trainer.train(0, 2);
        const auto before = numbers_of(trainer);
        for (int attempt = 0; attempt < 2; ++attempt) {
          auto state = trainer.state();
          state.values.set_item("epoch", 0);  // which the checkpoint lacks
          EXPECT_EQ(code_of([&] { load(state, path, group); }), ErrorCode::not_found);
          const auto after = numbers_of(trainer);
          ASSERT_EQ(after.size(), before.size());
          for (std::size_t i = 0; i < before.size(); ++i)
            EXPECT_TRUE(torch::equal(after[i], before[i])) << name_of(way) << " " << i;
        }
      });
    }
  }
}

// PyTorch's FSDP saves buffers so, and full_state_dict gives them so.
TEST(TrainingState, SavesBuffersInTheirOwnType) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/c";
  const MixedPrecision precision{.param_dtype = torch::kBFloat16, .buffer_dtype = torch::kBFloat16};
  const auto forward = [](torch::nn::BatchNorm1d& norm, int rank) {
    const torch::NoGradGuard no_grad;
    call_module(norm, torch::arange(12, torch::kFloat).view({4, 3}) * (rank + 1));
  };
  run_mesh(2, [&](Mesh& mesh) {
    torch::nn::BatchNorm1d norm(3), loaded(3);
    fully_shard(norm, mesh, {.mixed_precision = precision});
    fully_shard(loaded, mesh, {.mixed_precision = precision});
    forward(norm, 0);
    forward(loaded, 1);
    ASSERT_EQ(norm->running_mean.scalar_type(), torch::kBFloat16);
    save(TrainingState(norm), path, mesh.checkpoint_group());
    const auto contents = Checkpoint::open(path);
    const auto* mean = contents.find("model.running_mean");
    ASSERT_NE(mean, nullptr);
    EXPECT_EQ(mean->value.as_tensor().dtype, DType::float32);
    TrainingState state(loaded);
    load(state, path, mesh.checkpoint_group());
    EXPECT_EQ(loaded->running_mean.scalar_type(), torch::kBFloat16);
    EXPECT_TRUE(torch::equal(loaded->running_mean, norm->running_mean));
    EXPECT_TRUE(torch::equal(loaded->running_var, norm->running_var));
  });
}

// Every rank computes what all others hold of a model and its optimizer: nobody tells it.
TEST(TrainingState, OfShardedModelsNeedsNoProposals_P15) {
  for (const auto way : {Way::replicated, Way::rows, Way::flat}) {
    const TemporaryDirectory directory;
    run_mesh(3, [&](Mesh& mesh) {
      auto trainer = trainer_on(make_net({}), way, mesh, Kind::own);
      trainer.train(0, 2);
      FoldCounter group(mesh.checkpoint_group());
      save(trainer.state(), directory.path() + "/c", group);
      // The state is taken; buffers are compared; the kind is known; what is saved; what was
      // written; the commit.
      EXPECT_EQ(group.folds, 6) << name_of(way);
    });
  }
}

}  // namespace
}  // namespace tessera
