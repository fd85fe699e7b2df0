// Optimizer state between ways of sharding, worlds and optimizers: what was saved is what is
// loaded.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <tuple>

#include "optim_state/testing.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::expect_same;
using testing::make_net;
using testing::make_optimizer;
using testing::name_of;
using testing::run_mesh;
using testing::shard;
using testing::train;
using testing::Way;
using testing::with_sorted_groups;

// What an unsharded training has.
Value reference_state(int steps) {
  auto net = make_net({});
  auto optimizer = make_optimizer(net);
  train(net, *optimizer, 0, steps);
  return full_optim_state_dict(net, *optimizer, {.rank0_only = false});
}

class OptimStateOf : public ::testing::TestWithParam<std::tuple<Way, int>> {};

TEST_P(OptimStateOf, IsTheUnshardedStateByName_T1) {
  const auto [way, world] = GetParam();
  const auto expected = reference_state(3);
  run_mesh(world, [&](Mesh& mesh) {
    auto net = make_net({});
    shard(net, way, mesh);
    auto optimizer = make_optimizer(net);
    train(net, *optimizer, 0, 3);
    const auto own = optimizer_state_dict(*optimizer);
    const auto in_chunks = sharded_optim_state_dict(net, *optimizer);
    const auto full = full_optim_state_dict(net, *optimizer, {.rank0_only = false});
    expect_same(with_sorted_groups(full), with_sorted_groups(expected), 1e-5);
    expect_same(gather_state_dict(in_chunks, mesh), full);
    // And back, each way, to the bit.
    expect_same(shard_full_optim_state_dict(full, net, {.optim = OptimizerRef(*optimizer)}), own);
    expect_same(flatten_sharded_optim_state_dict(in_chunks, net, *optimizer), own);
    const auto given = mesh.rank() == 0 ? std::optional(full) : std::nullopt;
    expect_same(scatter_full_optim_state_dict(given, net,
                                              {.optim = OptimizerRef(*optimizer), .group = mesh}),
                own);
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, OptimStateOf,
                         ::testing::Combine(::testing::Values(Way::whole, Way::replicated,
                                                              Way::rows, Way::flat, Way::original,
                                                              Way::mixed, Way::aligned),
                                            ::testing::Values(1, 2, 3, 4)),
                         [](const auto& of) {
                           return name_of(std::get<0>(of.param)) +
                                  std::to_string(std::get<1>(of.param));
                         });

}  // namespace
}  // namespace tessera
