// Models that are asked within c10::InferenceMode, before, between and after steps that train them.
#include <c10/core/InferenceMode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "fsdp/testing/shardings.h"
#include "fsdp/testing/test_model.h"
#include "tessera/pytorch/state_dict.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using testing::run_mesh;
using testing::Sharding;
using testing::TanhStack;
using testing::with_values;

class InferenceMode : public ::testing::TestWithParam<Sharding> {};

TEST_P(InferenceMode, GivesTheNumbersOfOneProcess) {
  run_mesh(2, [&](Mesh& mesh) {
    auto alone = with_values(TanhStack(), 5), net = with_values(TanhStack(), 5);
    testing::shard_as(GetParam(), {}, mesh, net, net->first, net->second);
    torch::optim::SGD one(alone->parameters(), 0.1);
    torch::optim::SGD two(local_tensors(sharded_parameters(net)), 0.1);
    const auto x = torch::linspace(-1, 1, 12).view({3, 4});
    for (int step = 0; step < 3; ++step) {
      {
        const c10::InferenceMode inference;
        EXPECT_TRUE(testing::allclose(net(x * step), alone(x * step), 1e-5, 1e-6)) << step;
      }
      for (auto* model : {&alone, &net}) (*model)(x + step).square().mean().backward();
      for (auto* optimizer : {&one, &two}) {
        optimizer->step();
        optimizer->zero_grad();
      }
    }
    const auto whole = full_state_dict(net);
    for (const auto& named : alone->named_parameters())
      EXPECT_TRUE(testing::allclose(whole[named.key()], named.value(), 1e-5, 1e-6)) << named.key();
  });
}

INSTANTIATE_TEST_SUITE_P(Kinds, InferenceMode,
                         ::testing::Values(Sharding::rows, Sharding::flat, Sharding::original,
                                           Sharding::original_whole, Sharding::replicate),
                         testing::sharding_name);

}  // namespace
}  // namespace tessera
