// A training is saved in the background, also while its next step runs: a checkpoint holds what the
// training was at the call, or there is none.
#include "tessera/training_writer.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/steady.h"
#include "optim_state/testing.h"
#include "tessera/error.h"
#include "tessera/verify.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;
using testing::Way;

WriterOptions prompt(Overlap how) {
  return {.idle = false, .overlap = how};
}

// One that trains and is saved, with its own AdamW.
class Training {
 public:
  Training(Way way, const Mesh& mesh) : net_(make_net({})) {
    shard(net_, way, mesh);
    optimizer_.emplace(sharded_parameters(net_), AdamWOptions{.lr = 0.01});
  }
  void step(int number) {
    net_->zero_grad();
    optimizer_->zero_grad();
    loss_of(net_, batch(number, 0, 1)).backward();
    optimizer_->step();
  }
  [[nodiscard]] TrainingState state(int number) {
    TrainingState state(net_, *optimizer_);
    state.values.set_item("step", number);
    return state;
  }
  [[nodiscard]] Net& net() { return net_; }

 private:
  Net net_;
  std::optional<AdamW> optimizer_;
};

class TrainingWriters : public ::testing::TestWithParam<std::tuple<Way, Overlap>> {};

TEST_P(TrainingWriters, SaveWhatTheTrainingWasAtTheCall_R15) {
  const auto [way, how] = GetParam();
  constexpr int kSteps = 10;
  const TemporaryDirectory run;
  const auto path_of = [&](const char* what, int step) {
    return run.path() + "/" + what + std::to_string(step);
  };
  run_mesh(2, [&, way = way, how = how](Mesh& mesh) {
    Training training(way, mesh);
    CheckpointWriter writer(mesh.writer_group(), prompt(how));
    for (int step = 0; step < kSteps; ++step) {
      training.step(step);
      const auto state = training.state(step);
      save(state, path_of("want", step), mesh.checkpoint_group());
      (void)save(writer, state, path_of("got", step), {}, mesh.checkpoint_group());
    }
    writer.wait();
  });
  for (int step = 0; step < kSteps; ++step) {
    const auto want = Checkpoint::open(path_of("want", step));
    const auto got = Checkpoint::open(path_of("got", step));
    EXPECT_TRUE(diff(want, got).empty()) << step;
    EXPECT_EQ(got.tree().at("step").as_int(), step);
  }
}

INSTANTIATE_TEST_SUITE_P(EveryWay, TrainingWriters,
                         ::testing::Combine(::testing::Values(Way::whole, Way::replicated,
                                                              Way::rows, Way::flat, Way::original,
                                                              Way::mixed, Way::aligned),
                                            ::testing::Values(Overlap::measured, Overlap::always)),
                         [](const auto& given) {
                           return name_of(std::get<0>(given.param)) +
                                  (std::get<1>(given.param) == Overlap::always ? "_always"
                                                                               : "_measured");
                         });

// Somebody changes parameters at once, as an optimizer that does not wait would.
TEST(TrainingWriter, WhatIsChangedAtOnceIsNeverSaved) {
  const TemporaryDirectory run;
  torch::nn::Linear net(400, 1000);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  CheckpointWriter writer(prompt(Overlap::always));
  for (int i = 0; i < 40; ++i) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters()) parameter.fill_(i);
    const auto place = run.path() + "/" + std::to_string(i);
    const auto pending = save(writer, TrainingState(net, optimizer), place);
    if (i % 2 == 0) pending.await_staged();
    for (auto& parameter : net->parameters()) parameter.fill_(-1);
    if (i % 2 == 0) {
      pending.result();
      torch::nn::Linear loaded(400, 1000);
      TrainingState back(loaded);
      load(back, place);
      for (const auto& parameter : loaded->parameters())
        EXPECT_TRUE((parameter == i).all().item<bool>());
      continue;
    }
    try {
      pending.result();
      FAIL() << "nothing was thrown";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::conflict);
      EXPECT_THAT(error.what(), HasSubstr("model.weight"));
      EXPECT_THAT(error.what(), HasSubstr("await_staged"));
    }
  }
}

TEST(TrainingWriter, ParametersThatChangeAreNamed) {
  torch::nn::Linear net(2, 3);
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto steady = detail::steady_memory(TrainingState(net, optimizer));
  EXPECT_FALSE(steady.is_awaited);
  steady.require_unchanged();
  const torch::NoGradGuard no_grad;
  net->bias.add_(1);
  try {
    steady.require_unchanged();
    FAIL() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::conflict);
    EXPECT_EQ(error.key(), "model.bias");
  }
}

// An optimizer of libtorch does not wait for copies, so that a save waits for them by default.
TEST(TrainingWriter, OtherOptimizersAreNotOverlappedUnasked) {
  torch::nn::Linear net(2, 3);
  torch::optim::Adam adam(net->parameters());
  AdamW own(sharded_parameters(net));
  EXPECT_FALSE(detail::steady_memory(TrainingState(net, adam)).is_awaited);
  EXPECT_FALSE(detail::steady_memory(TrainingState(net)).is_awaited);
  EXPECT_TRUE(detail::steady_memory(TrainingState(net, own)).is_awaited);
}

// Buffers change in the next forward, and the program's tensors whenever it likes.
TEST(TrainingWriter, BuffersAndValuesAreCopiedAtOnce) {
  torch::nn::BatchNorm1d net(4);
  AdamW optimizer(sharded_parameters(net));
  TrainingState state(net, optimizer);
  state.values.set_item("same", Value(leaf_of(net->bias)));
  state.values.set_item("own", Value(leaf_of(torch::ones(3))));
  const auto steady = detail::steady_memory(state);
  const auto is_steady = [&](const at::Tensor& tensor) {
    return steady.has(*leaf_of(tensor).pieces.at(0).storage);
  };
  EXPECT_TRUE(is_steady(net->weight));
  EXPECT_FALSE(is_steady(net->bias));  // is one of the values, too
  EXPECT_FALSE(is_steady(net->running_mean));
  EXPECT_FALSE(is_steady(torch::ones(3)));
  EXPECT_FALSE(is_steady(torch::ones(0)));
  net->forward(torch::randn({5, 4})).sum().backward();
  optimizer.step();
  const auto moments = optimizer.state(0, 0);
  EXPECT_FALSE(is_steady(moments.exp_avg));  // was made behind the call
  EXPECT_TRUE(detail::steady_memory(state).has(*leaf_of(moments.exp_avg).pieces.at(0).storage));
}

}  // namespace
}  // namespace tessera
