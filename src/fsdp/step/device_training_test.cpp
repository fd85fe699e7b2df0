// Whole trainings on a device (torch/test_device): equal to those on the CPU, without races, with
// no more waits and launches than docs/design/device.md says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_training.h"
#include "tessera/checkpoint.h"
#include "tessera/optim.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/device.h"
#include "torch/test_device/device_mesh.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera {
namespace {

namespace nn = torch::nn;
using ::testing::HasSubstr;
using testing::loss_of;
using testing::make_net;

struct Trained {
  std::vector<double> losses;
  FullState state;
};

// The work of a user's step, with what waits for the device left out.
Trained train(const Mesh& mesh) {
  auto net = make_net({});
  testing::shard(net, mesh);
  AdamW optimizer(sharded_parameters(net), {.lr = 0.01});
  std::vector<torch::Tensor> losses;
  for (int step = 0; step < testing::kSteps; ++step) {
    auto loss = loss_of(net, testing::batch_of(step, 0, mesh).to(mesh.device()));
    loss.backward();
    losses.push_back(loss.detach());
    clip_grad_norm(sharded_parameters(net), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  Trained trained;
  for (const auto& loss : losses) trained.losses.push_back(loss.item<double>());
  trained.state = full_state_dict(net, {.offload_to_cpu = true});
  return trained;
}

// The device's operators are other compositions of the CPU's: equal but for rounding.
void expect_equal(const Trained& found, const Trained& expected) {
  ASSERT_EQ(found.losses.size(), expected.losses.size());
  for (std::size_t i = 0; i < found.losses.size(); ++i)
    EXPECT_NEAR(found.losses[i], expected.losses[i], 1e-5);
  for (const auto& entry : expected.state)
    EXPECT_TRUE(torch::allclose(entry.value(), found.state[entry.key()], 1e-4, 1e-5))
        << entry.key();
}

class DeviceTrainings : public ::testing::TestWithParam<int> {};

TEST_P(DeviceTrainings, EqualsTheCpus) {
  std::vector<Trained> expected(GetParam()), found(GetParam());
  testing::run_mesh(GetParam(), [&](Mesh& mesh) { expected[mesh.rank()] = train(mesh); });
  testing::run_device_mesh(GetParam(), [&](Mesh& mesh) { found[mesh.rank()] = train(mesh); });
  for (int rank = 0; rank < GetParam(); ++rank) expect_equal(found[rank], expected[rank]);
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// Counts of a step of a net, whose units are the blocks and the root; without options nothing is
// sharded.
testing::DeviceCounts counts_of_step(Mesh& mesh, const std::optional<ShardOptions>& options,
                                     int blocks) {
  auto net = make_net({.blocks = blocks});
  if (options) {
    for (auto& block : net->blocks) fully_shard(block, mesh, *options);
    fully_shard(net, mesh, *options);
  } else {
    testing::move_to(mesh.device(), *net);
  }
  const int device = mesh.device().index();
  testing::DeviceCounts counts;
  for (int step = 0; step < 2; ++step) {  // the first one makes what lasts
    const auto tokens = testing::batch_of(step, 0, mesh).to(mesh.device());
    static_cast<void>(testing::take_counts(device));
    loss_of(net, tokens).backward();
    counts = testing::take_counts(device);
    for (const auto& parameter : sharded_parameters(net))
      parameter.local.mutable_grad() = torch::Tensor();
  }
  return counts;
}

// The host queues a whole step without a wait, and of each unit and pass a number of kernels that
// does not depend on parameters and ranks.
TEST_P(DeviceTrainings, AStepWaitsForNothingAndLaunchesLittle) {
  constexpr int kBlocks = 4;
  testing::run_device_mesh(GetParam(), [&](Mesh& mesh) {
    const auto plain = counts_of_step(mesh, {}, kBlocks);
    const auto sharded = counts_of_step(mesh, ShardOptions(), kBlocks);
    EXPECT_THAT(plain.waits, ::testing::IsEmpty());
    EXPECT_THAT(sharded.waits, ::testing::IsEmpty());
    EXPECT_THAT(sharded.pageable, ::testing::IsEmpty());
    // Forward: gather, copy out. Backward: the same, and of the reduction the numbers that ranks
    // compare, there and back, fill, reduce, divide.
    const int gathers = 2 * kBlocks + 1, reductions = kBlocks + 1;
    EXPECT_LE(sharded.all_launches() - plain.all_launches(), 2 * gathers + 5 * reductions)
        << ::testing::PrintToString(sharded.launches) << " and without units "
        << ::testing::PrintToString(plain.launches);
  });
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// What a step does beyond the model's own kernels.
testing::DeviceCounts beyond(const testing::DeviceCounts& plain, testing::DeviceCounts sharded) {
  const auto subtract = [](const auto& less, auto& from) {
    for (const auto& [name, count] : less) from[name] -= count;
    std::erase_if(from, [](const auto& one) { return one.second == 0; });
  };
  subtract(plain.launches, sharded.launches);
  subtract(plain.written, sharded.written);
  return sharded;
}

// Gathers copy nothing, and reductions only what autograd hands over, once. What else is written
// are zeros behind it, what the ranks compare, and a rank's own part of the average.
TEST_P(DeviceTrainings, AFlatLayoutCopiesGradientsOnceAndNothingElse) {
  constexpr int kBlocks = 4, kUnits = kBlocks + 1;
  const auto ranks = static_cast<std::uint64_t>(GetParam());
  if (ranks == 1) GTEST_SKIP() << "nothing travels";
  std::uint64_t gradients = 0;
  for (const auto& parameter : make_net({.blocks = kBlocks})->parameters())
    gradients += parameter.nbytes();
  testing::run_device_mesh(GetParam(), [&](Mesh& mesh) {
    const ShardOptions flat{.layout = ShardLayout::flat};
    auto counts = beyond(counts_of_step(mesh, {}, kBlocks), counts_of_step(mesh, flat, kBlocks));
    EXPECT_EQ(counts.launches,
              (std::map<std::string, int>{{"_foreach_copy_", kUnits},
                                          {"_foreach_zero_", kUnits},
                                          {"collective allgather", 2 * kBlocks + 1},
                                          {"collective reduce_scatter", kUnits},
                                          {"copy_ from it", kUnits},
                                          {"copy_ to it", kUnits},
                                          {"div", kUnits}}));
    auto& written = counts.written;
    const auto compared = written["copy_ to it"], zeros = written["_foreach_zero_"];
    EXPECT_EQ(written["_foreach_copy_"], gradients + compared);
    EXPECT_EQ(ranks * written["div"], gradients + zeros);
    EXPECT_LE(zeros, ranks * kUnits * 128);
    EXPECT_EQ(written.size(), 4u) << ::testing::PrintToString(written);
  });
}

// What the ranks compare of a reduction comes late, and nothing is saved before it is looked at.
TEST(DeviceTraining, RanksThatDifferAreToldBeforeAnythingIsSaved) {
  for (const bool saves : {true, false}) {
    testing::set_late_events(true);
    std::vector<std::string> said(2);
    testing::run_device_mesh(2, [&](Mesh& mesh) {
      nn::Linear model(3, 4);
      replicate(model, mesh);
      const auto forward = [&] { return call_module(model, torch::ones({2, 3})).sum(); };
      forward().backward();
      if (mesh.rank() == 1) forward();  // its backward is left out
      forward().backward();
      said[mesh.rank()] = testing::error_of([&] {
        if (saves) {
          static_cast<void>(full_state_dict(model));
        } else {
          const torch::NoGradGuard forwards_only;
          for (int pass = 0; pass < 2; ++pass) forward();
        }
      });
    });
    testing::set_late_events(false);
    for (const auto& text : said)
      EXPECT_THAT(text, HasSubstr("reduced gradients of different passes")) << saves;
  }
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// Neither a sharded nor a replicated unit, whatever was called before; without a graph it goes on.
TEST(DeviceTraining, AUnitIsNotCapturedInAGraph) {
  testing::run_device_mesh(2, [&](Mesh& mesh) {
    nn::Linear sharded(3, 4), copied(3, 4);
    fully_shard(sharded, mesh);
    replicate(copied, mesh);
    for (auto* model : {&sharded, &copied}) {
      const auto step = [&] { call_module(*model, torch::ones({2, 3})).sum().backward(); };
      step();
      mesh.group().barrier();
      testing::set_capturing(true);
      EXPECT_THAT(testing::error_of(step), HasSubstr("a graph is being captured"));
      mesh.group().barrier();
      testing::set_capturing(false);
      abandon_step(*model);
      step();
    }
  });
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// With parameters that nothing has set to what is loaded.
FullState loaded(const Mesh& mesh, const std::string& path) {
  auto net = make_net({});
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.zero_();
  testing::shard(net, mesh);
  auto state = model_state(net);
  load(state, path, mesh.group());
  return full_state_dict(net, {.offload_to_cpu = true});
}

// A save's copies run beside the host: they are of page-locked memory.
TEST(DeviceTraining, SavesWhatOthersLoadHereAndOnTheCpu) {
  std::string directory = ::testing::TempDir() + "tessera_device_XXXXXX";
  ASSERT_NE(mkdtemp(directory.data()), nullptr);
  const auto path = directory + "/state";
  Trained saved;
  testing::run_device_mesh(2, [&](Mesh& mesh) {
    auto net = make_net({});
    testing::shard(net, mesh);
    AdamW optimizer(sharded_parameters(net), {.lr = 0.01});
    loss_of(net, testing::batch_of(0, 0, mesh)).backward();
    optimizer.step();
    static_cast<void>(testing::take_counts(mesh.device().index()));
    save(model_state(net), path, mesh.group());
    EXPECT_THAT(testing::take_counts(mesh.device().index()).pageable, ::testing::IsEmpty());
    const auto state = full_state_dict(net, {.offload_to_cpu = true});
    if (mesh.rank() == 0) saved.state = state;
  });
  const auto expect_saved = [&](Mesh& mesh) {
    const auto state = loaded(mesh, path);
    for (const auto& entry : saved.state)
      EXPECT_TRUE(testing::equal(state[entry.key()], entry.value())) << entry.key();
  };
  testing::run_device_mesh(3, expect_saved);
  testing::run_mesh(3, expect_saved);
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
  std::filesystem::remove_all(directory);
}

// In a pass and outside. Nothing else orders them: the host does not wait, and the memory is that
// of the gather before.
TEST(DeviceTraining, GathersSeeTheStepBeforeThem) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    const auto x = torch::ones({2, 4}).to(mesh.device());
    for (const bool in_pass : {true, false}) {
      nn::Linear linear(4, 4);
      fully_shard(linear, mesh);
      AdamW optimizer(sharded_parameters(linear), {.lr = 0.01});
      for (int step = 0; step < 2; ++step) {
        call_module(linear, x).sum().backward();
        optimizer.step();
      }
      if (in_pass) {
        static_cast<void>(call_module(linear, x));
      } else {
        unshard(linear);
        reshard(linear);
      }
    }
  });
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// What travels is what the shard held when the gather began.
TEST(DeviceTraining, AnOffloadedShardMayChangeWhileItIsGathered) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    nn::Linear linear(4, 4);
    fully_shard(linear, mesh, {.offload_to_cpu = true});
    auto gather = start_unshard(linear);
    for (const auto& parameter : sharded_parameters(linear)) parameter.local.detach().fill_(7);
    gather.wait();
    EXPECT_FALSE(testing::equal(linear->weight.detach(), torch::full({4, 4}, 7.F)));
  });
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// The memory goes back to the allocator, and a gather under way still fills it.
TEST(DeviceTraining, AModelMayDieWhileItGathers) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    for (const bool is_dropped : {false, true}) {
      auto net = make_net({});
      testing::shard(net, mesh);
      loss_of(net, testing::batch_of(0, 0, mesh)).backward();
      static_cast<void>(start_unshard(net));
      if (is_dropped) abandon_step(net);
    }
  });
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}

// Backward ran on a thread of the device's own.
TEST(DeviceTraining, AfterABackwardErrorsSayThatItIsOver) {
  testing::run_device_mesh(2, [](Mesh& mesh) {
    auto net = make_net({.blocks = 1});
    testing::shard(net, mesh);
    loss_of(net, testing::batch_of(0, 0, mesh)).backward();
    if (mesh.rank() == 1) return;  // and leaves
    const auto text = testing::error_of([&] { static_cast<void>(mesh.all_reduce_sum(1.0)); });
    EXPECT_THAT(text, HasSubstr("after the backward of step 1"));
  });
}

// Two threads of the engine come to the hooks of the two results at the same time.
struct ResultsOnBothSidesImpl : nn::Module {
  nn::Linear out{nullptr};
  std::atomic<int> arrived = 0;
  ResultsOnBothSidesImpl() { out = register_module("out", nn::Linear(4, 4)); }
  std::tuple<torch::Tensor, torch::Tensor> forward(const torch::Tensor& x) {
    arrived = 0;
    auto there = out(x), here = out(x).cpu();
    for (const auto& one : {there, here}) {
      one.register_hook([this](const torch::Tensor&) {
        const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(1);
        for (++arrived; arrived < 2 && std::chrono::steady_clock::now() < end;)
          std::this_thread::yield();
      });
    }
    return {there, here};
  }
};
TESSERA_MODULE(ResultsOnBothSides);

TEST(DeviceTraining, ResultsMayBeOnTheCpuToo) {
  constexpr int kSteps = 100;
  for (const bool is_sharded : {true, false}) {
    testing::run_device_mesh(2, [&](Mesh& mesh) {
      auto net = testing::with_values(ResultsOnBothSides(), 3);
      if (is_sharded) fully_shard(net, mesh);
      if (!is_sharded) replicate(net, mesh);
      for (int step = 0; step < kSteps; ++step) {
        const auto [there, here] = net(torch::ones({2, 4}).to(mesh.device()));
        (there.sum() + here.sum()).backward();
      }
      for (const auto& parameter : sharded_parameters(net)) {
        const auto& gradient = parameter.local.grad();
        EXPECT_TRUE(testing::allclose(gradient, torch::full(gradient.sizes(), 4.0 * kSteps)));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Ranks, DeviceTrainings, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace tessera
