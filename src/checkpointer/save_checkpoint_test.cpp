// Live models are saved as each kind, and trainings go on from there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <tuple>
#include <vector>

#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpointer.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::copied_golden;
using testing::files_of_rank;
using testing::Layers;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::train_layers;
using testing::Way;

constexpr int kSavedAfter = 2, kMoreSteps = 2;

Value trainer_of_rank(int rank) {
  return Value::dict({{"global_step", kSavedAfter}, {"rank", rank}});
}

// (kind, way that saves)
class Saved : public ::testing::TestWithParam<std::tuple<CheckpointerKind, Way>> {};

TEST_P(Saved, GoesOnOnOtherRanks_O40_O50_O60_O72) {
  const auto [kind, way] = GetParam();
  for (int world = 1; world <= 4; ++world) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    std::atomic<double> expected = 0;
    run_mesh(world, [&, kind = kind, way = way](Mesh& mesh) {
      auto layers = make_layers();
      shard_layers(layers, way, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.1});
      train_layers(layers, adam, 0, kSavedAfter);
      Checkpointer checkpointer(kind, mesh.checkpoint_group());
      checkpointer.save_checkpoint(path, layers, adam, trainer_of_rank(mesh.rank()));
      EXPECT_EQ(code_of([&] {
                  checkpointer.save_checkpoint(path, layers, adam, trainer_of_rank(mesh.rank()));
                }),
                ErrorCode::already_exists);
      expected = train_layers(layers, adam, kSavedAfter, kMoreSteps);
    });
    EXPECT_EQ(checkpointer_of(path), kind);
    for (const int ranks : {1, world, 3}) {
      run_mesh(ranks, [&, kind = kind](Mesh& mesh) {
        auto layers = make_layers(9);
        shard_layers(layers, Way::rows, mesh);
        AdamW adam(sharded_parameters(layers), {.lr = 0.7});
        Checkpointer checkpointer(kind, mesh.checkpoint_group());
        const auto state = checkpointer.restore_checkpoint(path, layers, adam);
        const bool own = kind != CheckpointerKind::full && ranks == world;
        EXPECT_EQ(state.at("rank").as_int(), own ? mesh.rank() : 0);
        EXPECT_NEAR(train_layers(layers, adam, kSavedAfter, kMoreSteps), expected, 1e-6);
      });
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Saved,
    ::testing::Values(std::tuple(CheckpointerKind::full, Way::original),
                      std::tuple(CheckpointerKind::full, Way::rows),
                      std::tuple(CheckpointerKind::full, Way::replicated),
                      std::tuple(CheckpointerKind::torch_new, Way::flat),
                      std::tuple(CheckpointerKind::torch_new, Way::rows),
                      std::tuple(CheckpointerKind::full, Way::aligned),
                      std::tuple(CheckpointerKind::torch_new, Way::aligned),
                      std::tuple(CheckpointerKind::torch_legacy, Way::aligned),
                      std::tuple(CheckpointerKind::torch_legacy, Way::original),
                      std::tuple(CheckpointerKind::torch_legacy, Way::rows),
                      std::tuple(CheckpointerKind::torch_legacy, Way::replicated),
                      std::tuple(CheckpointerKind::local, Way::original),
                      std::tuple(CheckpointerKind::local, Way::flat)),
    [](const auto& of) {
      return std::string(to_string(std::get<0>(of.param))) + "_" +
             testing::name_of(std::get<1>(of.param));
    });

using Sharder = std::function<void(Layers&, const Mesh&)>;

Sharder sharder_of(Way way) {
  return [way](Layers& layers, const Mesh& mesh) { shard_layers(layers, way, mesh); };
}

// Two copies, each on half of the ranks.
void shard_hybrid_rows(Layers& layers, const Mesh& mesh) {
  const auto both = mesh.split(mesh.size() / 2);
  fully_shard(layers->l1, both);
  fully_shard(layers->l2, both);
  fully_shard(layers, both);
}

void shard_hybrid_flat(Layers& layers, const Mesh& mesh) {
  FullyShardedOptions options;
  options.sharding_strategy = ShardingStrategy::hybrid_shard;
  options.use_orig_params = true;
  const FullyShardedDataParallel<Layers> wrapped(layers, mesh.split(mesh.size() / 2), options);
}

// What was saved by so many ranks in one way is restored by them from the files of each alone.
void restore_from_own_files(CheckpointerKind kind, const Sharder& shard, int ranks = 2) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(ranks, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard(layers, mesh);
    AdamW adam(sharded_parameters(layers), {.lr = 0.1});
    train_layers(layers, adam, 0, kSavedAfter);
    Checkpointer checkpointer(kind, mesh.checkpoint_group());
    checkpointer.save_checkpoint(path, layers, adam, trainer_of_rank(mesh.rank()));
    const auto expected = train_layers(layers, adam, kSavedAfter, kMoreSteps);

    const auto node = directory.path() + "/node" + std::to_string(mesh.rank());
    const auto own = files_of_rank(path, node, mesh.rank());
    auto other = make_layers(9);
    shard(other, mesh);
    AdamW other_adam(sharded_parameters(other), {.lr = 0.7});
    const auto state = checkpointer.restore_checkpoint(own, other, other_adam);
    EXPECT_EQ(state.at("rank").as_int(), mesh.rank());
    EXPECT_NEAR(train_layers(other, other_adam, kSavedAfter, kMoreSteps), expected, 1e-6);
  });
}

TEST(SavedFiles, OfEachRankAloneAreEnoughForIt_O61_O73) {
  restore_from_own_files(CheckpointerKind::local, sharder_of(Way::original));
  restore_from_own_files(CheckpointerKind::local, sharder_of(Way::flat));
  restore_from_own_files(CheckpointerKind::torch_legacy, sharder_of(Way::rows));
  restore_from_own_files(CheckpointerKind::torch_legacy, shard_hybrid_rows, 4);
}

// As OLMo's restore wants them in such a mesh.
TEST(SavedLegacy, HasDTensorsOfAHybridMesh_O60) {
  for (const Sharder& shard : {Sharder(shard_hybrid_rows), Sharder(shard_hybrid_flat)}) {
    const TemporaryDirectory directory;
    const auto path = directory.path() + "/saved";
    std::atomic<double> expected = 0;
    run_mesh(4, [&](Mesh& mesh) {
      auto layers = make_layers();
      shard(layers, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.1});
      train_layers(layers, adam, 0, kSavedAfter);
      Checkpointer checkpointer(CheckpointerKind::torch_legacy, mesh.checkpoint_group());
      checkpointer.save_checkpoint(path, layers, adam, trainer_of_rank(mesh.rank()));
      expected = train_layers(layers, adam, kSavedAfter, kMoreSteps);
    });
    std::ifstream file(path + "/rank3.pt", std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(file), {}};
    EXPECT_THAT(bytes, ::testing::HasSubstr("DeviceMesh"));
    EXPECT_THAT(bytes, ::testing::Not(::testing::HasSubstr("ShardedTensor")));
    for (const int ranks : {1, 3, 4}) {
      run_mesh(ranks, [&](Mesh& mesh) {
        auto layers = make_layers(9);
        shard_layers(layers, Way::rows, mesh);
        AdamW adam(sharded_parameters(layers), {.lr = 0.7});
        Checkpointer checkpointer(CheckpointerKind::torch_legacy, mesh.checkpoint_group());
        const auto state = checkpointer.restore_checkpoint(path, layers, adam);
        EXPECT_EQ(state.at("rank").as_int(), ranks == 4 ? mesh.rank() : 0);
        EXPECT_NEAR(train_layers(layers, adam, kSavedAfter, kMoreSteps), expected, 1e-6);
      });
    }
  }
}

TEST(SavedLocal, NeedsFlatParameters) {
  const TemporaryDirectory directory;
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group());
    const auto error = error_of([&] {
      checkpointer.save_checkpoint(directory.path() + "/s", layers, adam, Value::dict());
    });
    EXPECT_EQ(error.code(), ErrorCode::unsupported);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("`torch_new`"));
  });
  EXPECT_TRUE(fs::is_empty(directory.path()));
}

// What a checkpoint of OLMo's has in its groups is there again in the next one.
TEST(SavedGroups, KeepWhatWasRestored) {
  const TemporaryDirectory directory;
  const auto golden = copied_golden(directory, CheckpointerKind::local);
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::original, mesh);
    AdamW adam(sharded_parameters(layers));
    Checkpointer checkpointer(CheckpointerKind::local, mesh.checkpoint_group());
    checkpointer.restore_checkpoint(golden, layers, adam, {.load_trainer_state = false});
    checkpointer.save_checkpoint(path, layers, adam, Value::dict());
  });
  for (const std::string file : {"/model/rank0.pt", "/model/rank1.pt"}) {
    std::ifstream ours(path + file, std::ios::binary), theirs(golden + file, std::ios::binary);
    const std::string a{std::istreambuf_iterator<char>(ours), {}},
        b{std::istreambuf_iterator<char>(theirs), {}};
    EXPECT_EQ(a, b) << file;  // byte for byte
  }
  const auto group = [](const std::string& from) {
    return Checkpoint::open(from + "/optim/rank0.pt").load().at("param_groups").at(0U);
  };
  const auto mine = group(path), given = group(golden);
  EXPECT_TRUE(mine.at("param_names") == given.at("param_names"));
  EXPECT_TRUE(mine.at("max_grad_norm") == given.at("max_grad_norm"));
  EXPECT_EQ(mine.size(), given.size());
}

TEST(SavedConfig, IsTheTextThatWasGiven_O31) {
  const TemporaryDirectory directory;
  const auto alone = solo_group();
  auto layers = make_layers();
  AdamW adam(sharded_parameters(layers));
  const std::string text = "run_name: a\nsharded_checkpointer: torch_new\n";
  Checkpointer checkpointer(CheckpointerKind::torch_new, *alone, {.config = text});
  const auto path = directory.path() + "/saved", remote = directory.path() + "/remote";
  checkpointer.save_checkpoint(path, layers, adam, Value::dict({{"global_step", 1}}),
                               {.upload_to = remote});
  for (const auto& at : {path, remote}) {
    std::ifstream file(at + "/config.yaml");
    EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), text);
    EXPECT_EQ(checkpointer_of(at), CheckpointerKind::torch_new);
  }
  EXPECT_EQ(code_of([&] { checkpointer.save_checkpoint(path + "2", layers, adam, Value()); }),
            ErrorCode::invalid_argument);
}

TEST(SavedPaths, MayEndInSlashes_O33) {
  const TemporaryDirectory directory;
  const auto alone = solo_group();
  auto layers = make_layers();
  AdamW adam(sharded_parameters(layers));
  const auto path = directory.path() + "/saved", remote = directory.path() + "/remote";
  for (const auto kind : {CheckpointerKind::full, CheckpointerKind::torch_new}) {
    Checkpointer checkpointer(kind, *alone, {.save_overwrite = true});
    checkpointer.save_checkpoint(path + "/", layers, adam, trainer_of_rank(0),
                                 {.upload_to = remote + "//"});
    for (const auto& at : {path, remote}) {
      const Value trainer = checkpointer.restore_checkpoint(at + "/", layers, adam);
      EXPECT_EQ(trainer.at("global_step").as_int(), kSavedAfter);
      EXPECT_EQ(checkpointer_of(at + "//"), kind);
    }
    (void)checkpointer.unshard_checkpoint(path + "/", directory.path() + "/whole/", {});
    EXPECT_TRUE(fs::exists(directory.path() + "/whole/model.pt"));
    fs::remove_all(directory.path() + "/whole");
  }
  EXPECT_EQ(std::distance(fs::directory_iterator(directory.path()), {}), 2);
}

// The example of README, in a folder with `olmo/step1000`.
TEST(Readme, ATrainingOfOlmoGoesOn) {
  const TemporaryDirectory directory;
  const auto before = fs::current_path();
  fs::current_path(directory.path());
  fs::create_directory("olmo");
  run_mesh(2, [](Mesh& mesh) {
    auto model = make_layers();
    shard_layers(model, Way::flat, mesh);
    AdamW optimizer(sharded_parameters(model), {.lr = 0.1});
    train_layers(model, optimizer, 0, kSavedAfter);
    Value saved = trainer_of_rank(mesh.rank());
    saved["rng"] = random_state();
    Checkpointer(CheckpointerKind::local, mesh.checkpoint_group())
        .save_checkpoint("olmo/step1000", model, optimizer, saved);
    const double expected = train_layers(model, optimizer, kSavedAfter, 1);
    const std::int64_t step = 2000;
#include "readme_checkpointer.inc"
    EXPECT_EQ(trainer.at("rank").as_int(), mesh.rank());
    EXPECT_EQ(train_layers(model, optimizer, kSavedAfter, 1), expected);
    const Value again = checkpointer.restore_checkpoint("olmo/step2000", model, optimizer);
    EXPECT_EQ(again.at("global_step").as_int(), 2000);
    EXPECT_EQ(train_layers(model, optimizer, kSavedAfter, 1), expected);
  });
  fs::current_path(before);
}

// Ranks that read parts of an archive cannot compare its checksums: the digests of the state show
// what is wrong, when memory is filled already.
TEST(SavedFull, WhatIsNotWhatWasSavedCannotBeTrainedWith_R19) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/saved";
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    Checkpointer checkpointer(CheckpointerKind::full, mesh.checkpoint_group());
    checkpointer.save_checkpoint(path, layers, adam, trainer_of_rank(mesh.rank()));
  });
  const auto weight = make_layers()->l1->weight;
  std::fstream file(path + "/model.pt", std::ios::in | std::ios::out | std::ios::binary);
  const std::string bytes(std::istreambuf_iterator<char>(file), {});
  const auto at = bytes.find(
      std::string(reinterpret_cast<const char*>(weight.const_data_ptr()), weight.nbytes()));
  ASSERT_NE(at, std::string::npos);
  file.seekp(static_cast<std::streamoff>(at));
  file.put(static_cast<char>(bytes[at] ^ 1));
  file.close();
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers(9);
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    Checkpointer checkpointer(CheckpointerKind::full, mesh.checkpoint_group());
    const Error error = error_of([&] { checkpointer.restore_checkpoint(path, layers, adam); });
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_EQ(error.key(), "model.l1.weight");
    EXPECT_THAT(error.what(), ::testing::HasSubstr("after which all that it was to fill is NaN"));
    for (const auto& held : full_state_dict(layers))
      EXPECT_TRUE(held.value().isnan().all().item<bool>()) << held.key();
  });
}

}  // namespace
}  // namespace tessera
