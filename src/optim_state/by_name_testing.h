// Trainings for the tests of states by name, and what must not change when one is refused.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "optim_state/testing.h"
#include "tessera/pytorch/distributed_state_dict.h"
#include "torch/testing.h"

namespace tessera::testing {

inline constexpr Way kWays[] = {Way::whole,    Way::replicated, Way::rows,   Way::flat,
                                Way::original, Way::mixed,      Way::aligned};

struct Training {
  Net net;
  Optimizer optimizer;
};
inline Training run_on(Net net, Way way, const Mesh& mesh) {
  shard(net, way, mesh);
  auto optimizer = make_optimizer(net);
  return {net, std::move(optimizer)};
}
inline Training trained_run(Way way, const Mesh& mesh, int steps = 3) {
  auto run = run_on(make_net({}), way, mesh);
  train(run.net, *run.optimizer, 0, steps);
  return run;
}
// Not trained, and of other values.
inline Training fresh_run(Way way, const Mesh& mesh) {
  return run_on(half_net(), way, mesh);
}

// Everything, whole, on every rank.
inline Value all_of(Training& run) {
  auto [model, optim] = get_state_dict(run.net, *run.optimizer, {.full_state_dict = true});
  return Value::dict({{"model", model}, {"optim", with_sorted_groups(optim)}});
}
inline void expect_equal(Training& run, Training& expected) {
  expect_same(all_of(run), all_of(expected));
  for (const auto& parameter : sharded_parameters(run.net))
    EXPECT_FALSE(parameter.local.grad().defined()) << parameter.name();
}

// What is in `parameters` and the optimizer's own state, to see that neither has changed.
inline std::vector<at::Tensor> copies_of(Training& run) {
  std::vector<at::Tensor> copies;
  for (const auto& parameter : sharded_parameters(run.net))
    copies.push_back(parameter.local.detach().clone());
  for (const auto& parameter : sharded_parameters(run.net)) {
    const auto state = OptimizerRef(*run.optimizer).access().state(parameter.local);
    copies.push_back(torch::tensor(state.is(Value::Kind::none) ? 0 : 1));
    const auto* average = state.is(Value::Kind::none) ? nullptr : state.find("exp_avg");
    if (average != nullptr) copies.push_back(tensor_of(average->as_tensor()).clone());
  }
  copies.push_back(torch::tensor(run.optimizer->param_groups()[0].options().get_lr()));
  return copies;
}
template <typename Call>
std::string refusal(Training& run, Call&& call) {
  const auto before = copies_of(run);
  const auto text = error_of(call);
  const auto after = copies_of(run);
  EXPECT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < std::min(before.size(), after.size()); ++i)
    EXPECT_TRUE(torch::equal(before[i], after[i])) << i;
  return text;
}

inline Value lacking(const Value& dict, const std::string& key) {
  std::vector<Value::Pair> pairs;
  for (const auto& pair : dict.pairs()) {
    if (!(pair.first == Value(key))) pairs.push_back(pair);
  }
  return Value::dict(std::move(pairs));
}

// With another value for one key.
inline Value having(const Value& dict, const std::string& key, Value value) {
  auto copy = Value::dict(dict.pairs());
  copy.set_item(key, std::move(value));
  return copy;
}

}  // namespace tessera::testing
