#include "optim/adamw.h"

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "conformance/errors.h"
#include "tessera/optim.h"

namespace tessera {

// AdamW on gradients that are set by hand, beside torch::optim::AdamW. Trainings are in src/fsdp.

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

// Memory that is not the values -------------------------------------------------------------------

// Neighbours, which are one run for the kernel, and one alone; conjugates and negatives are bits
// that tensors have beside their memory.
TEST(AdamW, TakesNegativesForWhatTheyAre) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(7);
  const auto values = torch::randn({3, 4}, generator);
  const auto gradients = torch::randn({3, 4}, generator);
  for (const bool sharded : {false, true}) {
    for (int negated = 0; negated < 8; ++negated) {
      const auto shard = values.clone(), all = gradients.clone();
      std::vector<ShardedParameter> parameters;
      std::vector<torch::Tensor> expected;
      for (int i = 0; i < 3; ++i) {
        parameters.push_back(
            adamw_parameter("p" + std::to_string(i), shard[i].detach().requires_grad_(), sharded));
        expected.push_back(values[i].clone().requires_grad_());
        const bool is_negated = (negated >> i & 1) != 0;
        parameters[i].local.mutable_grad() = is_negated ? at::_neg_view(all[i]) : all[i];
        expected[i].mutable_grad() = is_negated ? -gradients[i] : gradients[i].clone();
      }
      AdamW optimizer(parameters, {.lr = 0.1});
      torch::optim::AdamW peer(expected, torch::optim::AdamWOptions(0.1));
      for (int step = 0; step < 2; ++step) {
        optimizer.step();
        peer.step();
      }
      for (int i = 0; i < 3; ++i) {
        EXPECT_TRUE(torch::allclose(parameters[i].local, expected[i], 1e-5, 1e-6))
            << i << " of " << negated;
      }
    }
  }
}

TEST(AdamW, UpdatesAParameterThatIsItsMemorysNegative) {
  const auto memory = torch::ones({3});
  auto parameter = at::_neg_view(memory).requires_grad_();
  auto expected = torch::full({3}, -1.0).requires_grad_();
  AdamW optimizer({adamw_parameter("p", parameter, false)}, {.lr = 0.1});
  torch::optim::AdamW peer({expected}, torch::optim::AdamWOptions(0.1));
  for (const auto* one : {&parameter, &expected}) one->mutable_grad() = torch::ones({3});
  optimizer.step();
  peer.step();
  EXPECT_TRUE(torch::allclose(parameter, expected, 1e-5, 1e-6));
}

// Options -----------------------------------------------------------------------------------------

TEST(AdamW, RefusesOptionsThatLibtorchRefuses) {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<AdamWOptions, std::string>> all{
      {{.lr = -1}, "Invalid learning rate: -1"},
      {{.lr = nan}, "Invalid learning rate: nan"},
      {{.beta1 = 1}, "Invalid beta parameter at index 0: 1"},
      {{.beta1 = -0.1}, "Invalid beta parameter at index 0: -0.1"},
      {{.beta2 = 1.5}, "Invalid beta parameter at index 1: 1.5"},
      {{.beta2 = nan}, "Invalid beta parameter at index 1: nan"},
      {{.eps = -1}, "Invalid epsilon value: -1"},
      {{.weight_decay = -3}, "Invalid weight_decay value: -3"},
  };
  const auto torchs = [](const AdamWOptions& options) {
    return torch::optim::AdamWOptions(options.lr)
        .betas({options.beta1, options.beta2})
        .eps(options.eps)
        .weight_decay(options.weight_decay);
  };
  auto local = torch::ones({3}).requires_grad_();
  const auto parameter = adamw_parameter("p", local, false);
  for (const auto& [options, text] : all) {
    EXPECT_ANY_THROW(torch::optim::AdamW({local}, torchs(options))) << text;
    EXPECT_THAT(error_of([&] { AdamW({parameter}, options); }).message(), HasSubstr(text));
    // Changed later, before anything is updated.
    AdamW optimizer({parameter});
    local.mutable_grad() = torch::ones({3});
    optimizer.options() = options;
    EXPECT_THAT(error_of([&] { optimizer.step(); }).message(), HasSubstr(text));
    EXPECT_TRUE(torch::equal(local, torch::ones({3})));
    EXPECT_FALSE(optimizer.state(0, 0).defined());
  }
  AdamW optimizer({parameter});
  EXPECT_THAT(error_of([&] { optimizer.set_lr(-1); }).message(),
              HasSubstr("Invalid learning rate: -1"));
  EXPECT_EQ(optimizer.options().lr, AdamWOptions().lr);
  for (const AdamWOptions& options : {AdamWOptions{.lr = 0, .beta1 = 0, .beta2 = 0, .eps = 0},
                                      AdamWOptions{.lr = inf, .weight_decay = 0}}) {
    EXPECT_NO_THROW(torch::optim::AdamW({local}, torchs(options)));
    EXPECT_NO_THROW(AdamW({parameter}, options));
  }
}

}  // namespace
}  // namespace tessera
