// What is queued on which stream of a device (torch/test_device) by units with copies, and by those
// that are parked after forward.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/pytorch/state_dict.h"
#include "tessera/unit_controls.h"
#include "torch/test_device/device_mesh.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::IsEmpty;
using testing::Net;

constexpr int kStreamRanks = 4;
constexpr int kStreamUnits = 5;  // four blocks and the root
using ShardNet = std::function<void(Net&, const Mesh&)>;

void shard_units(Net& net, const auto& mesh, const ShardOptions& options = {}) {
  for (auto& block : net->blocks) fully_shard(block, mesh, options);
  fully_shard(net, mesh, options);
}

void shard_with_copies(Net& net, const Mesh& mesh, int sharing_ranks) {
  const auto hybrid = mesh.split(sharing_ranks);
  if (!mesh.device().is_cpu()) {
    testing::count_collectives(hybrid.shard);
    testing::count_collectives(hybrid.replicate);
  }
  shard_units(net, hybrid);
}

void shard_and_park(Net& net, const Mesh& mesh) {
  if (!mesh.device().is_cpu()) testing::count_collectives(mesh.split(2).shard);
  shard_units(net, mesh, {.reshard_after_forward_ranks = 2});
}

// With micro-batches whose sums wait for the copies.
FullState train_on_streams(const Mesh& mesh, const ShardNet& shard) {
  auto net = testing::make_net({.blocks = kStreamUnits - 1});
  shard(net, mesh);
  torch::optim::SGD optimizer(local_tensors(sharded_parameters(net)), testing::sgd_options());
  for (int step = 0; step < testing::kSteps; ++step) {
    for (int micro = 0; micro < 3; ++micro) {
      set_requires_all_reduce(net, micro == 2);
      testing::loss_of(net, testing::batch_of(step, micro, mesh).to(mesh.device())).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  }
  return full_state_dict(net, {.offload_to_cpu = true});
}

void expect_as_on_the_cpu(const ShardNet& shard) {
  FullState expected;
  testing::run_mesh(kStreamRanks, [&](Mesh& mesh) {
    if (auto state = train_on_streams(mesh, shard); mesh.rank() == 0) expected = state;
  });
  testing::run_device_mesh(kStreamRanks, [&](Mesh& mesh) {
    const auto found = train_on_streams(mesh, shard);
    for (const auto& entry : expected)
      EXPECT_TRUE(torch::allclose(entry.value(), found[entry.key()], 1e-4, 1e-5)) << entry.key();
  });
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

testing::DeviceCounts counts_of_second_step(Mesh& mesh, const ShardNet& shard) {
  auto net = testing::make_net({.blocks = kStreamUnits - 1});
  shard(net, mesh);
  const int device = mesh.device().index();
  testing::DeviceCounts counts;
  for (int step = 0; step < 2; ++step) {
    const auto tokens = testing::batch_of(step, 0, mesh).to(mesh.device());
    static_cast<void>(testing::take_counts(device));
    testing::loss_of(net, tokens).backward();
    counts = testing::take_counts(device);
    for (const auto& parameter : sharded_parameters(net))
      parameter.local.mutable_grad() = torch::Tensor();
  }
  return counts;
}

TEST(DeviceStreams, UnitsWithCopiesTrainAsOnTheCpu) {
  // 1: each rank has a copy of its own, and sums are all that travels.
  for (const int sharing_ranks : {1, kStreamRanks / 2}) {
    expect_as_on_the_cpu(
        [&](Net& net, const Mesh& mesh) { shard_with_copies(net, mesh, sharing_ranks); });
  }
}

// The stream that computes waits for each gather, and for each average when it is taken.
TEST(DeviceStreams, SumsOverCopiesKeepNoComputationWaiting) {
  for (const int sharing_ranks : {1, kStreamRanks / 2}) {
    testing::run_device_mesh(kStreamRanks, [&](Mesh& mesh) {
      auto counts = counts_of_second_step(
          mesh, [&](Net& net, const Mesh& over) { shard_with_copies(net, over, sharing_ranks); });
      EXPECT_THAT(counts.waits, IsEmpty());
      constexpr int kGathers = 2 * kStreamUnits - 1;  // the root stays
      EXPECT_EQ(counts.stream_waits[0], kGathers + kStreamUnits);
      EXPECT_EQ(counts.launches["collective allreduce"], kStreamUnits);
    });
  }
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

TEST(DeviceStreams, ParkedUnitsTrainAsOnTheCpu) {
  expect_as_on_the_cpu(shard_and_park);
}

TEST(DeviceStreams, ParkingIsOneLaunchAUnit) {
  testing::run_device_mesh(kStreamRanks, [&](Mesh& mesh) {
    const auto whole =
        counts_of_second_step(mesh, [](Net& net, const Mesh& over) { shard_units(net, over); });
    const auto parked = counts_of_second_step(mesh, shard_and_park);
    EXPECT_THAT(parked.waits, IsEmpty());
    EXPECT_EQ(parked.all_launches() - whole.all_launches(), kStreamUnits - 1)
        << ::testing::PrintToString(parked.launches);
  });
  EXPECT_THAT(testing::take_races(), IsEmpty());
}

}  // namespace
}  // namespace tessera
