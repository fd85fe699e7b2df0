// Whole trainings on a device (torch/test_device): equal to those on the CPU, without races, with
// no more waits and launches than docs/design/device.md says.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/optim.h"
#include "tessera/pytorch/full_params.h"
#include "torch/test_device/device_mesh.h"
#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera {
namespace {

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

class DeviceTraining : public ::testing::TestWithParam<int> {};

TEST_P(DeviceTraining, EqualsTheCpus) {
  std::vector<Trained> expected(GetParam()), found(GetParam());
  testing::run_mesh(GetParam(), [&](Mesh& mesh) { expected[mesh.rank()] = train(mesh); });
  testing::run_device_mesh(GetParam(), [&](Mesh& mesh) { found[mesh.rank()] = train(mesh); });
  for (int rank = 0; rank < GetParam(); ++rank) expect_equal(found[rank], expected[rank]);
  EXPECT_THAT(testing::take_races(), ::testing::IsEmpty());
}
INSTANTIATE_TEST_SUITE_P(Ranks, DeviceTraining, ::testing::Values(1, 2, 3));

}  // namespace
}  // namespace tessera
