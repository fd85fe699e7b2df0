// Ways to shard one model, and trees compared: for the tests of optimizer state.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "fsdp/testing/test_training.h"
#include "tessera/pytorch/fully_sharded_data_parallel.h"
#include "tessera/pytorch/optim_state_dict.h"
#include "torch/tensor.h"

namespace tessera::testing {

enum class Way { whole, replicated, rows, flat, original, mixed, aligned };
inline std::string name_of(Way way) {
  constexpr const char* kNames[] = {"whole",    "replicated", "rows",   "flat",
                                    "original", "mixed",      "aligned"};
  return kNames[static_cast<int>(way)];
}

// Other values than those of make_net.
inline Net half_net(bool tied = false) {
  auto net = make_net({.tied = tied});
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters()) parameter.fill_(0.5);
  return net;
}

inline void shard(Net& net, Way way, const Mesh& mesh) {
  const auto wrap = [&](bool use_orig_params) {
    const FullyShardedDataParallel<Net> model(
        net, mesh,
        {.auto_wrap_policy = module_wrap_policy<BlockImpl>(), .use_orig_params = use_orig_params});
  };
  switch (way) {
    case Way::whole:
      break;
    case Way::replicated:
      replicate(net, mesh);
      break;
    case Way::rows:
      for (auto& block : net->blocks) fully_shard(block, mesh);
      fully_shard(net, mesh);
      break;
    case Way::aligned:  // by fully_shard, parameters end to end
      for (auto& block : net->blocks) fully_shard(block, mesh, {.layout = ShardLayout::flat});
      fully_shard(net, mesh, {.layout = ShardLayout::flat});
      break;
    case Way::flat:
      wrap(false);
      break;
    case Way::original:
      wrap(true);
      break;
    case Way::mixed:  // units of two kinds, and parameters of none
      fully_shard(net->blocks[0], mesh);
      FullyShardedDataParallel<Block>(net->blocks[1], mesh, {.use_orig_params = true});
      break;
  }
}

using Optimizer = std::unique_ptr<torch::optim::Optimizer>;
inline Optimizer make_optimizer(Net& net) {
  return std::make_unique<torch::optim::Adam>(local_tensors(sharded_parameters(net)),
                                              torch::optim::AdamOptions(0.01).amsgrad(true));
}

// All ranks learn from the same batches, so that a model whose gradients nobody averages does too.
inline double train(Net& net, torch::optim::Optimizer& optimizer, int first, int count) {
  double last = 0;
  for (int step = first; step < first + count; ++step) {
    optimizer.zero_grad();
    auto loss = loss_of(net, batch(step, 0, 1));
    loss.backward();
    last = loss.item<double>();
    optimizer.step();
  }
  return last;
}

inline void expect_losses(const std::vector<double>& mine, const std::vector<double>& expected,
                          const std::string& what = {}) {
  ASSERT_EQ(mine.size(), expected.size());
  for (std::size_t i = 0; i < mine.size(); ++i)
    EXPECT_NEAR(mine[i], expected[i], 1e-5 * std::abs(expected[i])) << what << " step " << i;
}

// The leaves by path; tensors as they are.
inline void flatten_into(const Value& tree, const std::string& path,
                         std::map<std::string, Value>& found) {
  if (tree.is(Value::Kind::dict)) {
    for (const auto& [key, value] : tree.pairs()) {
      const auto part =
          key.is(Value::Kind::string) ? key.as_string() : std::to_string(key.as_int());
      flatten_into(value, path + "/" + part, found);
    }
    return;
  }
  found.emplace(path, tree);
}

// A flat parameter stands in its group for the parameters in it, in its own order (spec L-4).
inline Value with_sorted_groups(const Value& tree) {
  Value::List groups;
  for (const auto& group : tree.at("param_groups").items()) {
    auto params = group.at("params").items();
    std::ranges::sort(params, {}, [](const Value& name) { return name.as_string(); });
    auto copy = Value::dict(group.pairs());
    copy.set_item("params", Value::list(std::move(params)));
    groups.push_back(std::move(copy));
  }
  return Value::dict(
      {{"state", tree.at("state")}, {"param_groups", Value::list(std::move(groups))}});
}

inline void expect_same(const Value& a, const Value& b, double tolerance = 0) {
  std::map<std::string, Value> left, right;
  flatten_into(a, "", left);
  flatten_into(b, "", right);
  std::vector<std::string> left_names, right_names;
  for (const auto& entry : left) left_names.push_back(entry.first);
  for (const auto& entry : right) right_names.push_back(entry.first);
  ASSERT_EQ(left_names, right_names);
  for (const auto& [path, value] : left) {
    const auto& other = right.at(path);
    ASSERT_EQ(value.kind(), other.kind()) << path;
    if (!value.is(Value::Kind::tensor)) {
      EXPECT_TRUE(value == other) << path;
      continue;
    }
    const auto x = tensor_of(value.as_tensor()), y = tensor_of(other.as_tensor());
    ASSERT_EQ(x.sizes(), y.sizes()) << path;
    ASSERT_EQ(x.dtype(), y.dtype()) << path;
    if (tolerance == 0) {
      EXPECT_TRUE(torch::equal(x, y)) << path;
    } else {
      EXPECT_TRUE(torch::allclose(x, y, tolerance, tolerance)) << path;
    }
  }
}

}  // namespace tessera::testing
