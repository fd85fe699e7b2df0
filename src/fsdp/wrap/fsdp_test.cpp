// Training sharded gives the numbers of training whole (spec T1), with threads as ranks.
#include "tessera/fsdp.h"
#include "tessera/trace.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fsdp/testing/test_training.h"
#include "tessera/collectives.h"
#include "tessera/optim.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::batch;
using testing::batch_of;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_mesh;
using testing::shard;

// In doubles: AdamW divides by the size of a gradient, so one that is nothing but rounding would
// move a parameter by the whole learning rate, either way.
Net precise_net(const testing::NetOptions& options) {
  auto net = make_net(options);
  net->to(torch::kDouble);
  return net;
}

// Losses and final parameters of `steps` steps on all ranks' batches together, not sharded.
struct Expected {
  std::vector<double> losses;
  std::vector<torch::Tensor> parameters;
};
Expected expected_of(int world, int steps, const testing::NetOptions& options) {
  auto net = precise_net(options);
  // parameters() of libtorch names a shared parameter twice.
  torch::optim::AdamW optimizer(local_tensors(sharded_parameters(net)),
                                torch::optim::AdamWOptions(1e-2));
  Expected result;
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net, batch(step, 0, world));
    loss.backward();
    optimizer.step();
    result.losses.push_back(loss.item<double>());
  }
  for (const auto& parameter : sharded_parameters(net))
    result.parameters.push_back(parameter.local.detach());
  return result;
}

class Training : public ::testing::TestWithParam<std::tuple<int, bool>> {};

TEST_P(Training, EqualsSingleProcessOnAllRanksData_T1) {
  const auto [world, tied] = GetParam();
  testing::NetOptions options;
  options.tied = tied;
  const auto expected = expected_of(world, 4, options);
  run_mesh(world, [&](Mesh& mesh) {
    auto net = precise_net(options);
    shard(net, mesh);
    const auto parameters = sharded_parameters(net);
    AdamW optimizer(parameters, {.lr = 1e-2});
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      auto loss = loss_of(net, batch_of(step, 0, mesh));
      loss.backward();
      optimizer.step();
      const double mean = mesh.all_reduce_sum(loss.item<double>()) / mesh.size();
      ASSERT_NEAR(mean, expected.losses[step], 1e-9 * expected.losses[step]) << "step " << step;
    }
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const auto& whole = expected.parameters[i];
      const auto rows = parameters[i].local.size(0);
      const auto mine = whole.narrow(0, parameters[i].offset, rows);
      EXPECT_TRUE(testing::allclose(parameters[i].local.detach(), mine, 1e-8, 1e-9))
          << parameters[i].name();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, Training,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4), ::testing::Bool()));

// As a contrastive loss does it: every rank computes the loss of all ranks' rows. Its collectives
// go between those of the units.
TEST(FullyShard, TakesALossOfWhatAllRanksGathered) {
  for (const bool same_host : {true, false}) {
    for (const int world : {1, 2, 3}) {
      const auto expected = expected_of(world, 3, {});
      const auto body = [&](Mesh& mesh) {
        auto net = precise_net({});
        shard(net, mesh);
        AdamW optimizer(sharded_parameters(net), {.lr = 1e-2});
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          const auto tokens = batch_of(step, 0, mesh);
          const auto logits = net(tokens.narrow(1, 0, 4));
          auto loss = torch::cross_entropy_loss(
              torch::cat(all_gather(logits, mesh)).reshape({-1, testing::kVocabulary}),
              torch::cat(all_gather(tokens, mesh)).narrow(1, 1, 4).reshape({-1}).to(mesh.device()));
          loss.backward();
          optimizer.step();
          ASSERT_NEAR(loss.item<double>(), expected.losses[step], 1e-9 * expected.losses[step])
              << "step " << step << " of " << world;
        }
      };
      run_mesh(world, body, std::chrono::seconds(30), same_host);
    }
  }
}

TEST(FullyShard, GathersTwiceAndFreesAfterForward_T4_T6) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_net({});
    shard(net, mesh);
    const auto step = [&] {
      auto loss = loss_of(net, batch(0, 0, 1));
      for (const auto& unit : unit_reports(net)) {
        EXPECT_EQ(unit.gathered_bytes == 0, !unit.name.empty()) << "after forward: " << unit.name;
      }
      loss.backward();
      for (const auto& unit : unit_reports(net)) {
        EXPECT_EQ(unit.gathered_bytes, 0u) << "after backward: " << unit.name;
      }
    };
    for (std::uint64_t count = 1; count <= 3; ++count) {
      step();
      for (const auto& unit : unit_reports(net)) {
        EXPECT_EQ(unit.gathers, count * (unit.name.empty() ? 1 : 2)) << unit.name;
        EXPECT_EQ(unit.reductions, count) << unit.name;
      }
    }
  });
}

}  // namespace
}  // namespace tessera
