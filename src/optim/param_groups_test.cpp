// Options of one group, whatever the optimizer is.
#include "tessera/param_groups.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include "conformance/errors.h"
#include "tessera/error.h"
#include "tessera/optim.h"

namespace tessera {
namespace {

at::Tensor trained() {
  return torch::ones({2}).set_requires_grad(true);
}

void expect_options_of_one_group(const OptimizerRef& optimizer) {
  ASSERT_EQ(group_count(optimizer), 2U);
  set_lr(optimizer, 1, 0.25);
  set_weight_decay(optimizer, 0, 0.5);
  EXPECT_EQ(get_lr(optimizer, 0), 0.125);
  EXPECT_EQ(get_lr(optimizer, 1), 0.25);
  EXPECT_EQ(get_weight_decay(optimizer, 0), 0.5);
  EXPECT_EQ(get_weight_decay(optimizer, 1), 0.0625);
  for (const double wrong : {-0.1, std::nan("")}) {
    EXPECT_EQ(code_of([&] { set_lr(optimizer, 0, wrong); }), ErrorCode::invalid_argument);
    EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 0, wrong); }), ErrorCode::invalid_argument);
  }
  EXPECT_EQ(get_lr(optimizer, 0), 0.125);
  EXPECT_EQ(code_of([&] { static_cast<void>(get_lr(optimizer, 2)); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 2, 0); }), ErrorCode::invalid_argument);
}

TEST(ParamGroups, OfAdamWAreItsOptions) {
  const auto group = [] {
    ShardedParameter parameter;
    parameter.names = {"a"};
    parameter.shape = {2};
    parameter.local = trained();
    return ParameterGroup{{std::move(parameter)},
                          {.lr = 0.125, .beta1 = 0.75, .eps = 1e-3, .weight_decay = 0.0625}};
  };
  AdamW optimizer({group(), group()});
  expect_options_of_one_group(optimizer);
  EXPECT_EQ(optimizer.options(1).lr, 0.25);
  EXPECT_EQ(optimizer.options(0).weight_decay, 0.5);
  // The others stay.
  EXPECT_EQ(optimizer.options(1).beta1, 0.75);
  EXPECT_EQ(optimizer.options(1).eps, 1e-3);
}

TEST(ParamGroups, OfTorchsOptimizersAreTheirOptions) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (int i = 0; i < 2; ++i) {
    groups.emplace_back(std::vector{trained()},
                        std::make_unique<torch::optim::SGDOptions>(
                            torch::optim::SGDOptions(0.125).momentum(0.75).weight_decay(0.0625)));
  }
  torch::optim::SGD optimizer(groups, torch::optim::SGDOptions(1));
  expect_options_of_one_group(optimizer);
  const auto& options =
      static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[1].options());
  EXPECT_EQ(options.lr(), 0.25);
  EXPECT_EQ(options.momentum(), 0.75);
}

TEST(ParamGroups, AnOptionThatIsNotThereIsUnsupported) {
  torch::optim::LBFGS optimizer({trained()}, torch::optim::LBFGSOptions(0.5));
  EXPECT_EQ(get_lr(optimizer, 0), 0.5);
  EXPECT_EQ(code_of([&] { set_weight_decay(optimizer, 0, 0.1); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
