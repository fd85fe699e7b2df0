// AdamW on gradients that are set by hand, beside torch::optim::AdamW. Trainings are in src/fsdp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "conformance/errors.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;

ShardedParameter adamw_parameter(const std::string& name, const torch::Tensor& local,
                                 bool sharded) {
  ShardedParameter parameter;
  parameter.names = {name};
  parameter.shape = local.sizes().vec();
  parameter.local = local;
  parameter.sharded = sharded;
  return parameter;
}

// State ---------------------------------------------------------------------------------------

// A storage's address is free when it dies, and malloc likes to give it to the next one.
TEST(AdamW, StatesOfShardsThatGotOtherMemoryAreTheirOwn) {
  for (int round = 0; round < 50; ++round) {
    auto a = torch::ones({4}).requires_grad_(), b = torch::ones({4}).requires_grad_();
    AdamW optimizer({adamw_parameter("a", a, true), adamw_parameter("b", b, true)}, {.lr = 0.1});
    a.mutable_grad() = torch::full({4}, 2.0);
    optimizer.step();
    const auto before = optimizer.state(0, 0).exp_avg.clone();
    a.set_data(torch::zeros({4}));
    b.set_data(torch::zeros({4}));
    a.mutable_grad() = torch::Tensor();
    b.mutable_grad() = torch::full({4}, -1.0);
    optimizer.step();
    ASSERT_TRUE(torch::equal(optimizer.state(0, 0).exp_avg, before)) << round;
    ASSERT_TRUE(torch::allclose(optimizer.state(0, 1).exp_avg, torch::full({4}, -0.1))) << round;
  }
}

}  // namespace
}  // namespace tessera
