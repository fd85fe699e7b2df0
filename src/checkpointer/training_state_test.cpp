// TrainingState and the files of OLMo's kinds: it goes on from them as a Checkpointer does.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <string>
#include <vector>

#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpointer.h"
#include "tessera/training_state.h"

namespace tessera {
namespace {

using testing::files_of_rank;
using testing::Layers;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::train_layers;
using testing::Way;

constexpr CheckpointerKind kCheckpointers[] = {CheckpointerKind::full, CheckpointerKind::torch_new,
                                               CheckpointerKind::torch_legacy,
                                               CheckpointerKind::local};

// Two ranks train and save with a Checkpointer. Returns the loss two steps later.
double save_two_ranks(CheckpointerKind kind, Way way, const std::string& path) {
  std::atomic<double> expected = 0;
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, way, mesh);
    AdamW adam(sharded_parameters(layers), {.lr = 0.1});
    train_layers(layers, adam, 0, 2);
    CheckpointerOptions options;
    options.group_options.set_item("max_grad_norm", 1.5);
    Checkpointer checkpointer(kind, mesh.checkpoint_group(), options);
    checkpointer.save_checkpoint(path, layers, adam,
                                 Value::dict({{"global_step", 2}, {"rank", mesh.rank()}}));
    expected = train_layers(layers, adam, 2, 2);
  });
  return expected;
}

TEST(TrainingStateOfOlmo, GoesOnFromEachKind_O41_O73) {
  for (const auto kind : kCheckpointers) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    const auto expected = save_two_ranks(kind, Way::original, path);
    for (const int ranks : {1, 2, 3}) {
      run_mesh(ranks, [&](Mesh& mesh) {
        auto layers = make_layers(9);
        shard_layers(layers, Way::rows, mesh);
        AdamW adam(sharded_parameters(layers), {.lr = 0.7});
        TrainingState state(layers, adam);
        state.values.set_item("train", Value());
        load(state, path, mesh.checkpoint_group());
        const bool own = kind != CheckpointerKind::full && ranks == 2;
        EXPECT_EQ(state.values.at("train").at("global_step").as_int(), 2);
        EXPECT_EQ(state.values.at("train").at("rank").as_int(), own ? mesh.rank() : 0);
        EXPECT_NEAR(train_layers(layers, adam, 2, 2), expected, 1e-6);
      });
    }
  }
}

TEST(TrainingStateOfOlmo, OpensARanksOwnFilesAlone_O61_O73) {
  for (const auto& [kind, way] : {std::pair(CheckpointerKind::local, Way::original),
                                  std::pair(CheckpointerKind::torch_legacy, Way::rows)}) {
    SCOPED_TRACE(std::string(to_string(kind)));
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    const auto expected = save_two_ranks(kind, way, path);
    run_mesh(2, [&, way = way](Mesh& mesh) {
      const auto node = directory.path() + "/node" + std::to_string(mesh.rank());
      auto layers = make_layers(9);
      shard_layers(layers, way, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.7});
      TrainingState state(layers, adam);
      state.values.set_item("train", Value());
      load(state, files_of_rank(path, node, mesh.rank()), mesh.checkpoint_group());
      EXPECT_EQ(state.values.at("train").at("rank").as_int(), mesh.rank());
      EXPECT_NEAR(train_layers(layers, adam, 2, 2), expected, 1e-6);
    });
  }
}

// What this optimizer does not know of its groups comes back with the next save, of any kind.
TEST(TrainingStateOfOlmo, KeepsOptionsThatTheOptimizerDoesNotKnow) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  save_two_ranks(CheckpointerKind::local, Way::original, path);
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers(9);
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    TrainingState state(layers, adam);
    load(state, path, mesh.checkpoint_group());
    EXPECT_EQ(state.other_options.at(0).at("max_grad_norm").as_real(), 1.5);
    save(state, directory.path() + "/dcp", mesh.checkpoint_group());
    TrainingState again(layers, adam);
    load(again, directory.path() + "/dcp", mesh.checkpoint_group());
    EXPECT_EQ(again.other_options.at(0).at("max_grad_norm").as_real(), 1.5);
  });
  const auto group = Checkpoint::open(directory.path() + "/dcp").load().at("optim");
  EXPECT_EQ(group.at("param_groups").at(0U).at("max_grad_norm").as_real(), 1.5);
  EXPECT_EQ(group.at("param_groups").at(0U).at("lr").as_real(), 0.1);
}

TEST(TrainingStateOfOlmo, AsksForATrainerStateThatIsThere) {
  const TemporaryDirectory directory;
  const auto golden = testing::copied_golden(directory, CheckpointerKind::local);
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    TrainingState state(layers, adam);
    load(state, golden, mesh.checkpoint_group());
    state.values.set_item("train", 7);
    EXPECT_EQ(code_of([&] { load(state, golden, mesh.checkpoint_group()); }), ErrorCode::not_found);
    EXPECT_EQ(state.values.at("train").as_int(), 7);
  });
}

}  // namespace
}  // namespace tessera
