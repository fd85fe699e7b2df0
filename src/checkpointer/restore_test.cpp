#include "checkpointer/restore.h"

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpointer.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"

namespace tessera {

// Live models take what PyTorch and OLMo saved as any of the four kinds, on any ranks.

namespace {

using testing::copied_golden;
using testing::golden_path;
using testing::Layers;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::Way;

constexpr RestoreOptions kNoTrainer{.load_trainer_state = false};

// The model and the optimizer of a checkpoint, whole and by names.
std::pair<Value, Value> whole_state_of(const std::string& path, const std::string& work) {
  ConvertOptions how;
  how.to = CheckpointKind::olmo_full;
  convert(path, work, how);
  return {Checkpoint::open(work + "/model.pt").load(), Checkpoint::open(work + "/optim.pt").load()};
}

// (kind, way of sharding)
class Restored : public ::testing::TestWithParam<std::tuple<CheckpointerKind, Way>> {};

TEST_P(Restored, HasWhatPyTorchSaved_O41_O51_O61_O73) {
  const auto [kind, way] = GetParam();
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, kind);
  const auto [model, optim] = whole_state_of(path, directory.path() + "/whole");
  for (int world = 1; world <= 4; ++world) {
    SCOPED_TRACE(world);
    run_mesh(world, [&, kind = kind, way = way, model = model, optim = optim](Mesh& mesh) {
      auto layers = make_layers();
      shard_layers(layers, way, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.5});
      Checkpointer checkpointer(kind, mesh.checkpoint_group());
      checkpointer.restore_checkpoint(path, layers, adam, kNoTrainer);
      const auto found = full_state_dict(layers);
      const Value state = full_optim_state_dict(layers, adam);
      EXPECT_EQ(adam.options(0).lr, 1e-3);
      if (mesh.rank() > 0) return;
      for (const auto& [name, tensor] : model.pairs()) {
        EXPECT_TRUE(torch::equal(found[name.as_string()], tensor_of(tensor.as_tensor())))
            << name.as_string();
      }
      testing::expect_same(state.at("state"), optim.at("state"));
    });
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Restored,
    ::testing::Combine(::testing::Values(CheckpointerKind::full, CheckpointerKind::torch_new,
                                         CheckpointerKind::torch_legacy, CheckpointerKind::local),
                       ::testing::Values(Way::whole, Way::replicated, Way::rows, Way::flat,
                                         Way::original, Way::aligned)),
    [](const auto& of) {
      return std::string(to_string(std::get<0>(of.param))) + "_" +
             testing::name_of(std::get<1>(of.param));
    });

// Without original parameters the state goes by flat parameters, in groups without names.
TEST(RestoredLocal, OfFlatParametersFillsOtherWays_O73) {
  const auto path = golden_path("fsdp1_uop0_ws2/local");
  const TemporaryDirectory directory;
  const auto optim = whole_state_of(path, directory.path() + "/whole").second;
  for (const auto way : {Way::whole, Way::rows, Way::flat, Way::original, Way::aligned}) {
    run_mesh(3, [&](Mesh& mesh) {
      auto layers = make_layers();
      shard_layers(layers, way, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.5});
      Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group());
      checkpointer.restore_checkpoint(path, layers, adam, kNoTrainer);
      const Value state = full_optim_state_dict(layers, adam);
      if (mesh.rank() == 0) testing::expect_same(state.at("state"), optim.at("state"));
    });
  }
}

// O-13: an old checkpoint has one group, the optimizer two, of which one does not decay.
TEST(RestoredOptimizer, MakesTwoGroupsOfOne_O13) {
  for (const auto kind : {CheckpointerKind::torch_new, CheckpointerKind::local}) {
    const TemporaryDirectory directory;
    const auto path = copied_golden(directory, kind);
    const auto optim = whole_state_of(path, directory.path() + "/whole").second;
    run_mesh(2, [&](Mesh& mesh) {
      auto layers = make_layers();
      shard_layers(layers, Way::original, mesh);
      ParameterGroup decay{{}, {.lr = 0.5, .weight_decay = 0.1}},
          rest{{}, {.lr = 0.5, .weight_decay = 0}};
      for (auto& parameter : sharded_parameters(layers))
        (parameter.shape.size() > 1 ? decay : rest).parameters.push_back(std::move(parameter));
      AdamW adam(std::vector<ParameterGroup>{std::move(decay), std::move(rest)});
      Checkpointer checkpointer(kind, mesh.checkpoint_group());
      checkpointer.restore_checkpoint(path, layers, adam, kNoTrainer);
      EXPECT_EQ(adam.options(0).lr, 1e-3);
      EXPECT_EQ(adam.options(1).lr, 1e-3);
      EXPECT_EQ(adam.options(0).weight_decay, 0.01);
      EXPECT_EQ(adam.options(1).weight_decay, 0);
      const Value state = full_optim_state_dict(layers, adam);
      if (mesh.rank() == 0) testing::expect_same(state.at("state"), optim.at("state"));
    });
  }
}

// O-06: the files that the cache has come from there.
TEST(RestoredModel, IsReadThroughACache_O06) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::local);
  const TemporaryDirectory cache;
  const auto copies = copied_golden(cache, CheckpointerKind::local);
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::original, mesh);
    AdamW adam(sharded_parameters(layers));
    Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group());
    checkpointer.restore_checkpoint(path, layers, adam,
                                    {.local_cache = copies, .load_trainer_state = false});
    EXPECT_EQ(code_of([&] {
                checkpointer.restore_checkpoint(directory.path() + "/nowhere", layers, adam,
                                                {.local_cache = copies});
              }),
              ErrorCode::not_found);
  });
}

TEST(RestoredModel, LeavesTheOptimizerAlone) {
  run_mesh(2, [](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers), {.lr = 0.5});
    Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group());
    checkpointer.restore_checkpoint(golden_path("fsdp1_uop1_ws2/local"), layers, adam,
                                    {.load_optimizer_state = false, .load_trainer_state = false});
    EXPECT_EQ(adam.options(0).lr, 0.5);
    EXPECT_FALSE(adam.state(0, 0).defined());
  });
}

}  // namespace
}  // namespace tessera
