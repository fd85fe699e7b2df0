// A training is saved in the background, also while its next step runs: a checkpoint holds what the
// training was at the call, or there is none.
#include "tessera/training_writer.h"

#include <gmock/gmock.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/copies.h"
#include "conformance/temporary_directory.h"
#include "fsdp/testing/test_training.h"
#include "optim_state/steady.h"
#include "optim_state/testing.h"
#include "tessera/collectives.h"
#include "tessera/error.h"
#include "tessera/fsdp.h"
#include "tessera/optimizer_in_backward.h"
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

// Writes of whole tensors through data() and data_ptr(), and by collectives in place.
TEST(TrainingWriter, WhatLibtorchDoesNotCountIsSeen) {
  torch::nn::Sequential net(torch::nn::Linear(700, 300), torch::nn::Linear(300, 1));
  AdamW optimizer(sharded_parameters(net));
  optimizer.make_state();
  std::vector<torch::Tensor> all = net->parameters();
  all.push_back(optimizer.state(0, 2).exp_avg_sq);
  for (auto& tensor : all) {
    for (const bool by_pointer : {false, true}) {
      const auto steady = detail::steady_memory(TrainingState(net, optimizer));
      steady.require_unchanged();
      const auto version = tensor._version();
      if (by_pointer) {
        std::fill_n(tensor.data_ptr<float>(), tensor.numel(), 5.0F);
      } else {
        tensor.data().fill_(7);
      }
      EXPECT_EQ(tensor._version(), version);
      EXPECT_THROW(steady.require_unchanged(), Error);
    }
  }
}

// However many there are, and though one is of one element.
TEST(TrainingWriter, WhatLibtorchDoesNotCountIsSeenInEachOfMany) {
  torch::nn::Sequential net;
  for (int i = 0; i < 800; ++i) net->push_back(torch::nn::Linear(8, 1));
  AdamW optimizer(sharded_parameters(net));
  optimizer.make_state();
  const auto parameters = net->parameters();
  for (std::size_t i = 0; i < parameters.size(); i += 37) {
    const auto steady = detail::steady_memory(TrainingState(net, optimizer));
    parameters[i].data().mul_(1.01).add_(0.01);
    EXPECT_THROW(steady.require_unchanged(), Error) << i;
  }
}

// What lies between its elements is not its own.
TEST(TrainingWriter, OnlyTheElementsOfATensorAreCompared) {
  torch::nn::Linear net(3, 4);
  const torch::NoGradGuard no_grad;
  const auto memory = torch::ones({4, 6});
  net->weight.set_data(memory.narrow(1, 0, 3));
  AdamW optimizer(sharded_parameters(net));
  const auto steady = detail::steady_memory(TrainingState(net, optimizer));
  memory.narrow(1, 3, 3).data().fill_(2);
  steady.require_unchanged();
  memory.narrow(1, 0, 3).data().fill_(2);
  EXPECT_THROW(steady.require_unchanged(), Error);
}

// Nobody reads what is not there any more.
TEST(TrainingWriter, ParametersThatEndAreNotCompared) {
  auto net = std::make_optional<torch::nn::Linear>(700, 300);
  auto optimizer = std::make_optional<AdamW>(sharded_parameters(*net));
  optimizer->make_state();
  const auto steady = detail::steady_memory(TrainingState(*net, *optimizer));
  (*net)->bias.storage().unsafeGetStorageImpl()->set_nbytes(0);
  optimizer.reset();
  net.reset();
  steady.require_unchanged();
}

// Averaged weights that are put in through data(), for an evaluation behind each save.
TEST(TrainingWriter, WhatIsPutInThroughDataIsNotOverlappedUnasked) {
  torch::nn::Linear net(20, 30);
  AdamW optimizer(sharded_parameters(net), AdamWOptions{.lr = 0.1});
  CheckpointWriter writer(prompt(Overlap::measured));
  const TemporaryDirectory run;
  for (int step = 0; step < 12; ++step) {
    net(torch::ones({1, 20})).sum().backward();
    optimizer.step();
    const auto pending =
        save(writer, TrainingState(net, optimizer), run.path() + "/" + std::to_string(step));
    EXPECT_TRUE(pending.staged()) << step;
    net->weight.data().mul_(0.5);
    pending.result();
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

// Another optimizer may train what those of the state do not, and would not wait.
TEST(TrainingWriter, ParametersOfNoOptimizerAreNotOverlappedUnasked) {
  torch::nn::Sequential net(torch::nn::Linear(2, 3), torch::nn::Linear(3, 1));
  AdamW optimizer({sharded_parameters(net).at(0), sharded_parameters(net).at(1)});
  const TrainingState state(net, optimizer);
  EXPECT_FALSE(detail::steady_memory(state).is_awaited);
  for (auto& frozen : net[1]->parameters()) frozen.requires_grad_(false);
  EXPECT_TRUE(detail::steady_memory(state).is_awaited);
}

// A forward that writes to the weights, of which libtorch does what PyTorch does: saves wait by
// themselves, and none is lost.
TEST(TrainingWriter, WeightsThatAForwardChangesAreNotOverlappedUnasked) {
  torch::nn::Embedding net(torch::nn::EmbeddingOptions(8, 4).max_norm(0.5));
  AdamW optimizer(sharded_parameters(net), AdamWOptions{.lr = 0.1});
  CheckpointWriter writer(prompt(Overlap::measured));
  const TemporaryDirectory run;
  for (int step = 0; step < 12; ++step) {
    net(torch::arange(8)).sum().backward();
    optimizer.step();
    const auto steady = detail::steady_memory(TrainingState(net, optimizer));
    const auto place = run.path() + "/" + std::to_string(step);
    const auto pending = save(writer, TrainingState(net, optimizer), place);
    EXPECT_TRUE(pending.staged()) << step;
    net(torch::arange(8));
    EXPECT_THROW(steady.require_unchanged(), Error);
    pending.result();
  }
}

TEST(TrainingWriter, MomentsThatChangeAreNoticed) {
  torch::nn::Linear net(2, 3);
  AdamW optimizer(sharded_parameters(net));
  optimizer.make_state();
  const auto steady = detail::steady_memory(TrainingState(net, optimizer));
  steady.require_unchanged();
  const torch::NoGradGuard no_grad;
  const at::Tensor moments = optimizer.state(0, 0).exp_avg;
  moments.add_(1);
  EXPECT_THROW(steady.require_unchanged(), Error);
}

// Whether `write` ends no earlier than a copy that is under way, and changes `target` no earlier.
bool waits_for_copies(const std::function<void()>& write, const at::Tensor& target = {}) {
  const auto before = target.defined() ? target.clone() : at::Tensor();
  std::optional<CopyUnderWay> copy(std::in_place);
  std::atomic<bool> has_written = false;
  std::thread writer([&] {
    write();
    has_written = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const bool waits = !has_written && (!target.defined() || target.equal(before));
  copy.reset();
  writer.join();
  return waits;
}

TEST(TrainingWriter, WhatWritesToParametersOrMomentsWaits) {
  torch::nn::Linear net(2, 3);
  AdamW adam(sharded_parameters(net));
  EXPECT_TRUE(waits_for_copies([&] { adam.make_state(); }));
  EXPECT_TRUE(waits_for_copies([&] { adam.step(); }));
  EXPECT_TRUE(waits_for_copies([&] { adam.set_state(0, 0, adam.state(0, 0)); }));
  apply_optimizer_in_backward(sharded_parameters(net), [](std::vector<torch::Tensor> tensors) {
    return std::make_unique<torch::optim::SGD>(std::move(tensors), 0.1);
  });
  EXPECT_TRUE(waits_for_copies([&] { net(torch::ones({1, 2})).sum().backward(); }));
}

TEST(TrainingWriter, UnitsAndBroadcastsThatWriteToParametersWait) {
  run_mesh(2, [](Mesh& mesh) {
    torch::nn::Linear net(2, 4);
    fully_shard(net, mesh);
    net->weight.set_data(torch::full({4, 2}, 3.0F));  // in the place of the whole parameter
    EXPECT_TRUE(waits_for_copies([&] {
      const torch::NoGradGuard no_grad;
      call_module(net, torch::ones({1, 2}));
    }));
    const auto local = sharded_parameters(net).at(0).local;
    const torch::NoGradGuard no_grad;
    EXPECT_TRUE((local == 3).all().item<bool>());
    torch::nn::Linear all(2, 4);
    all->weight.fill_(mesh.rank());
    EXPECT_TRUE(waits_for_copies([&] { sync_module_states(all, mesh); }, all->weight.detach()));
    auto values = torch::full({4}, static_cast<float>(mesh.rank()));
    EXPECT_EQ(waits_for_copies([&] { broadcast(values, 0, mesh); }), mesh.rank() == 1);
  });
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
