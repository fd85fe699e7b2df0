// Model and optimizer state as a tree with PyTorch's names (spec P-18; keys as get_state_dict gives
// them).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cstring>

#include "fsdp/testing/test_model.h"
#include "tessera/error.h"
#include "tessera/train_state.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using testing::run_mesh;

std::vector<std::string> keys(const Value& dict) {
  std::vector<std::string> names;
  for (const auto& pair : dict.pairs()) names.push_back(pair.first.as_string());
  return names;
}

testing::Net make_sharded(const Mesh& mesh, bool tied) {
  auto net = testing::make_net({.tied = tied, .blocks = 1});
  testing::shard(net, mesh);
  return net;
}

AdamW make_optimizer(testing::Net& net) {
  ParameterGroup decay{{}, {.lr = 0.01, .weight_decay = 0.1}},
      rest{{}, {.lr = 0.01, .weight_decay = 0}};
  for (auto& parameter : sharded_parameters(net)) {
    (parameter.shape.size() > 1 ? decay : rest).parameters.push_back(parameter);
  }
  return AdamW(std::vector<ParameterGroup>{decay, rest});
}

double step(testing::Net& net, AdamW& optimizer, int seed) {
  auto tokens = torch::arange(6).add(seed).remainder(testing::kVocabulary).view({2, 3});
  auto loss = net(tokens).square().mean();
  loss.backward();
  optimizer.step();
  optimizer.zero_grad();
  return loss.item<double>();
}

TEST(ModelState, HasPythonsNamesAndThisRanksRows) {
  run_mesh(4, [](Mesh& mesh) {
    auto net = make_sharded(mesh, true);
    const auto state = model_state(net);
    EXPECT_THAT(keys(state), ElementsAre("embed.weight", "block0.norm.weight", "block0.norm.bias",
                                         "block0.up.weight", "block0.up.bias", "block0.down.weight",
                                         "block0.down.bias", "head.weight"));
    const auto& leaf = state.at("block0.up.weight").as_tensor();  // 13 rows: 4, 4, 4, 1
    EXPECT_EQ(leaf.shape, (Shape{13, testing::kWidth}));
    EXPECT_TRUE(leaf.sharded);
    ASSERT_EQ(leaf.pieces.size(), 1u);
    const auto& box = std::get<Box>(leaf.pieces[0].slice);
    EXPECT_EQ(box.offsets, (Shape{4 * mesh.rank(), 0}));
    EXPECT_EQ(box.sizes, (Shape{mesh.rank() == 3 ? 1 : 4, testing::kWidth}));
    // 7 rows: 2, 2, 2, 1. An element changed through the tree is changed in the model.
    const auto& bias = state.at("block0.norm.bias").as_tensor().pieces[0];
    const float value = 42;
    std::memcpy(bias.storage->data + bias.storage_offset * sizeof value, &value, sizeof value);
    for (const auto& parameter : sharded_parameters(net)) {
      if (parameter.name() != "block0.norm.bias") continue;
      EXPECT_EQ(parameter.local[0].item<float>(), 42);
    }
    EXPECT_EQ(sharded_parameters(net)[0].names,
              (std::vector<std::string>{"embed.weight", "head.weight"}));
  });
}

// What stays gathered would otherwise compute with the values before the load.
TEST(ModelState, ALoadIsSeenByUnitsThatStayGathered) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = testing::make_net({.blocks = 1});
    const ShardOptions options{.reshard_after_forward = false, .reshard_after_backward = false};
    for (auto& block : net->blocks) fully_shard(block, mesh, options);
    fully_shard(net, mesh, options);
    const auto tokens = torch::arange(6).view({2, 3});
    net(tokens).sum().backward();
    ASSERT_GT(unit_reports(net)[0].gathered_bytes, 0u);
    const auto state = model_state(net);
    const auto& head = state.at("head.weight").as_tensor();
    std::memset(head.pieces[0].storage->data + head.pieces[0].storage_offset * sizeof(float), 0,
                sharded_parameters(net).back().local.nbytes());
    EXPECT_EQ(net(tokens).abs().sum().item<float>(), 0);
  });
}

TEST(ModelState, RankWithoutRowsHasAnEmptyChunkAtTheEnd_P18) {
  run_mesh(3, [](Mesh& mesh) {
    torch::nn::Linear linear(3, 2);
    fully_shard(linear, mesh);
    const auto state = model_state(linear);
    const auto& box = std::get<Box>(state.at("weight").as_tensor().pieces.at(0).slice);
    if (mesh.rank() == 2) {
      EXPECT_EQ(box.offsets, (Shape{2, 0}));
      EXPECT_EQ(box.sizes, (Shape{0, 3}));
    }
  });
}

TEST(ModelState, UnshardedModuleWithBuffers) {
  torch::nn::Sequential seq(torch::nn::Linear(2, 3), torch::nn::BatchNorm1d(3));
  const auto state = model_state(seq);
  EXPECT_THAT(keys(state), ElementsAre("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean",
                                       "1.running_var", "1.num_batches_tracked"));
  EXPECT_FALSE(state.at("0.weight").as_tensor().sharded);
  EXPECT_EQ(state.at("1.num_batches_tracked").as_tensor().dtype, DType::int64);
}

TEST(OptimState, HasPytorchsKeysAndGroups) {
  run_mesh(2, [](Mesh& mesh) {
    auto net = make_sharded(mesh, true);
    auto optimizer = make_optimizer(net);
    step(net, optimizer, 0);
    const auto state = optim_state(optimizer);
    EXPECT_THAT(keys(state), ElementsAre("state", "param_groups"));
    const auto& one = state.at("state").at("embed.weight");
    EXPECT_THAT(keys(one), ElementsAre("step", "exp_avg", "exp_avg_sq"));
    EXPECT_EQ(tensor_of(one.at("step").as_tensor()).item<float>(), 1);
    EXPECT_TRUE(one.at("exp_avg").as_tensor().sharded);
    EXPECT_FALSE(one.at("step").as_tensor().sharded);
    const auto& group = state.at("param_groups").items().at(1);
    EXPECT_THAT(keys(group), ElementsAre("lr", "betas", "eps", "weight_decay", "amsgrad",
                                         "maximize", "foreach", "capturable", "differentiable",
                                         "fused", "decoupled_weight_decay", "params"));
    EXPECT_EQ(group.at("params").items().at(0).as_string(), "block0.norm.weight");
  });
}

// Copies the elements of every tensor leaf of `from` into the memory of `to`, as a load does.
void copy_tensors(const Value& from, const Value& to) {
  const auto source = flatten(from), target = flatten(to);
  for (std::size_t i = 0; i < source.size(); ++i) {
    ASSERT_EQ(source[i].name, target[i].name);
    if (!source[i].value.is(Value::Kind::tensor)) continue;
    const auto &a = source[i].value.as_tensor(), &b = target[i].value.as_tensor();
    const auto size = size_of(a.dtype);
    const auto &p = a.pieces[0], &q = b.pieces[0];
    std::memcpy(q.storage->data + q.storage_offset * size,
                p.storage->data + p.storage_offset * size, numel(p.slice) * size);
  }
}

TEST(OptimState, ARunContinuesFromAnothersState) {
  run_mesh(2, [](Mesh& mesh) {
    auto first = make_sharded(mesh, false), second = make_sharded(mesh, false);
    auto one = make_optimizer(first), two = make_optimizer(second);
    for (int i = 0; i < 3; ++i) step(first, one, i);
    one.set_lr(0.005);
    step(second, two, 9);
    copy_tensors(model_state(first), model_state(second));
    const auto saved = optim_state(one);
    copy_tensors(saved, optim_state(two));
    set_optim_state(two, saved);
    EXPECT_EQ(two.options(1).lr, 0.005);
    for (int i = 3; i < 6; ++i) EXPECT_EQ(step(first, one, i), step(second, two, i)) << i;
  });
}

// FSDP1's flat parameters stand in the order of units, others in that of modules.
TEST(OptimState, TheOrderOfAGroupIsNoOtherGroup) {
  run_mesh(1, [](Mesh& mesh) {
    auto net = make_sharded(mesh, false);
    auto parameters = sharded_parameters(net);
    AdamW optimizer(parameters);
    std::ranges::reverse(parameters);
    AdamW other(parameters);
    other.set_lr(0.25);
    set_optim_state(optimizer, optim_state(other));
    EXPECT_EQ(optimizer.options().lr, 0.25);
  });
}

TEST(OptimState, RefusesOtherGroups) {
  run_mesh(1, [](Mesh& mesh) {
    auto net = make_sharded(mesh, false);
    auto optimizer = make_optimizer(net);
    AdamW other(sharded_parameters(net));
    EXPECT_THROW(set_optim_state(other, optim_state(optimizer)), Error);
  });
}

}  // namespace
}  // namespace tessera
