// A model's state as a tree with PyTorch's names (spec P-18; keys as get_state_dict gives them).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cstring>

#include "fsdp/state/model_state.h"
#include "fsdp/testing/test_model.h"
#include "tessera/error.h"
#include "tessera/trace.h"
#include "torch/device.h"
#include "torch/tensor.h"
#include "torch/testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::keys;
using testing::run_mesh;
using testing::sharded_net;

TEST(ModelState, HasPythonsNamesAndThisRanksRows) {
  run_mesh(4, [](Mesh& mesh) {
    auto net = sharded_net(mesh, true);
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

TEST(ModelState, TensorsOnOtherDevicesAreUnsupportedByName) {
  torch::nn::Linear linear(3, 2);
  replace_data(linear->bias, torch::empty({2}, torch::kMeta));
  const auto text = testing::error_of([&] { (void)model_state(linear); });
  EXPECT_THAT(text, HasSubstr("unsupported: a tensor on meta"));
  EXPECT_THAT(text, HasSubstr("key 'bias'"));
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

}  // namespace
}  // namespace tessera
