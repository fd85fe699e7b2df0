// What each rank gets of the trainer's state, and what a restore refuses before it changes
// anything.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <string>
#include <vector>

#include "base/testing.h"
#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpointer.h"
#include "tessera/convert.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::copied_golden;
using testing::golden_path;
using ::testing::HasSubstr;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::Way;

Value state_of_rank(int rank) {
  return Value::dict({{"global_step", 3},
                      {"rank", rank},
                      {"rng", Value::dict({{"python", "of rank " + std::to_string(rank)}})}});
}

void add_trainer_files(const std::string& path, int ranks) {
  fs::create_directory(path + "/train");
  for (int rank = 0; rank < ranks; ++rank)
    save(state_of_rank(rank), path + "/train/rank" + std::to_string(rank) + ".pt");
}

// A restore on two ranks of FSDP1, with an optimizer that has no state.
struct Restore {
  CheckpointerKind kind;
  std::string path;
  CheckpointerOptions options = {};

  Value run(Mesh& mesh) const {
    auto layers = make_layers();
    shard_layers(layers, Way::original, mesh);
    AdamW adam(sharded_parameters(layers), {.lr = 0.5});
    Checkpointer checkpointer(kind, mesh.checkpoint_group(), options);
    try {
      return checkpointer.restore_checkpoint(path, layers, adam);
    } catch (const Error&) {
      EXPECT_EQ(adam.options(0).lr, 0.5);
      EXPECT_FALSE(adam.state(0, 0).defined());
      throw;
    }
  }
  // The error that all ranks get.
  [[nodiscard]] Error error(int world = 2) const {
    std::mutex mutex;
    std::vector<Error> errors;
    run_mesh(world, [&](Mesh& mesh) {
      const auto error = error_of([&] { (void)run(mesh); });
      const std::scoped_lock lock(mutex);
      errors.push_back(error);
    });
    for (const auto& error : errors) EXPECT_EQ(error.code(), errors.front().code());
    return errors.at(0);
  }
};

TEST(TrainerState, IsTheRanksOwn_O51_O73) {
  for (const auto kind : {CheckpointerKind::local, CheckpointerKind::torch_new}) {
    const TemporaryDirectory directory;
    const auto path = copied_golden(directory, kind);
    add_trainer_files(path, 2);
    run_mesh(2, [&](Mesh& mesh) {
      const auto state = Restore{kind, path}.run(mesh);
      EXPECT_TRUE(state == state_of_rank(mesh.rank()));
    });
  }
}

TEST(TrainerState, OnOtherRanksIsRankZerosWithoutItsRandomState_O51) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::local);
  add_trainer_files(path, 2);
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(3, [&](Mesh& mesh) {
      const auto state = Restore{CheckpointerKind::local, path}.run(mesh);
      EXPECT_EQ(state.at("rank").as_int(), 0);
      EXPECT_EQ(state.find("rng"), nullptr);
    });
  });
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("2")));
}

TEST(TrainerState, OfAMissingFileIsIncomplete_R20) {
  for (const auto kind : {CheckpointerKind::local, CheckpointerKind::torch_new}) {
    const TemporaryDirectory directory;
    const auto path = copied_golden(directory, kind);
    add_trainer_files(path, 2);
    fs::remove(path + "/train/rank1.pt");
    EXPECT_EQ((Restore{kind, path}).error().code(), ErrorCode::incomplete);
    fs::remove_all(path + "/train");
    run_mesh(2, [&](Mesh& mesh) {
      EXPECT_TRUE((Restore{kind, path}.run(mesh).is(Value::Kind::none)));
    });
  }
}

// Beside the model and the optimizer in each rank's file.
TEST(TrainerState, OfLegacyIsWhatLiesBesideTheModel_O61) {
  const TemporaryDirectory directory;
  const auto full = copied_golden(directory, CheckpointerKind::full);
  save(state_of_rank(0), full + "/train.pt");
  ConvertOptions how;
  how.to = CheckpointKind::olmo_legacy;
  how.ranks = 2;
  convert(full, directory.path() + "/legacy", how);
  run_mesh(2, [&](Mesh& mesh) {
    const auto state =
        Restore{CheckpointerKind::torch_legacy, directory.path() + "/legacy"}.run(mesh);
    EXPECT_TRUE(state == state_of_rank(0));
  });
}

TEST(TrainerState, OfFullHasRandomNumbersOfItsOwnOnEachRank_OQ15) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::full);
  const auto random = random_state(Value::dict({{"python", 1}}));
  save(Value::dict({{"global_step", 3}, {"rng", random}}), path + "/other.pt");  // as it once was
  const auto warnings = testing_support::warnings_of([&] {
    run_mesh(2, [&](Mesh& mesh) {
      const auto state = Restore{CheckpointerKind::full, path}.run(mesh);
      EXPECT_EQ(state.at("global_step").as_int(), 3);
      testing::expect_same(state.at("rng"), derived_random_state(random, mesh.rank()));
      EXPECT_EQ(state.at("rng").find("python") != nullptr, mesh.rank() == 0);
    });
  });
  EXPECT_THAT(warnings, ::testing::Contains(HasSubstr("random state of rank 0 alone")));
  save(Value::dict({{"global_step", 4}}), path + "/train.pt");
  run_mesh(1, [&](Mesh& mesh) {
    const auto state = Restore{CheckpointerKind::full, path}.run(mesh);
    EXPECT_EQ(state.at("global_step").as_int(), 4);
  });
}

TEST(Restore, RefusesAConfigOfAnotherKind) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::local);
  add_trainer_files(path, 2);
  std::ofstream(path + "/config.yaml") << "sharded_checkpointer: torch_new\n";
  const auto error = (Restore{CheckpointerKind::local, path}).error();
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.what(), HasSubstr("config.yaml"));
  std::ofstream(path + "/config.yaml") << "sharded_checkpointer: local\n";
  run_mesh(2, [&](Mesh& mesh) { (void)Restore{CheckpointerKind::local, path}.run(mesh); });
  // Beside any sharded kind there is `full`.
  const auto full = copied_golden(directory, CheckpointerKind::full);
  save(state_of_rank(0), full + "/train.pt");
  std::ofstream(full + "/config.yaml") << "sharded_checkpointer: torch_new\n";
  run_mesh(2, [&](Mesh& mesh) { (void)Restore{CheckpointerKind::full, full}.run(mesh); });
}

TEST(Restore, RefusesFilesOfAnotherKind) {
  const auto path = golden_path("fsdp1_uop1_ws2/local");
  EXPECT_EQ((Restore{CheckpointerKind::torch_legacy, path}).error().code(),
            ErrorCode::invalid_argument);
  EXPECT_EQ((Restore{CheckpointerKind::local, "/nowhere"}).error().code(), ErrorCode::not_found);
}

TEST(Restore, RefusesAnotherModel) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::full);
  save(state_of_rank(0), path + "/train.pt");
  const auto change = [&](const std::function<void(Value&)>& edit) {
    Value model = Checkpoint::open(golden_path("fsdp1_uop1_ws2/model.pt")).load();
    edit(model);
    SaveOptions how;
    how.overwrite = true;
    save(model, path + "/model.pt", how);
    return (Restore{CheckpointerKind::full, path}).error();
  };
  const auto missing = change([](Value& model) { model.erase("l2.bias"); });
  EXPECT_EQ(missing.code(), ErrorCode::mismatch);
  EXPECT_EQ(missing.key(), "model.l2.bias");
  const auto extra = change([](Value& model) { model.rename("l1.bias", "l1.gain"); });
  EXPECT_EQ(extra.key(), "model.l1.bias");
  const auto added = change([](Value& model) { model.set_item("l3.bias", model.at("l2.bias")); });
  EXPECT_EQ(added.code(), ErrorCode::mismatch);
  EXPECT_EQ(added.key(), "model.l3.bias");
  const auto shape = change([](Value& model) { model.set_item("l2.bias", model.at("l1.bias")); });
  EXPECT_EQ(shape.code(), ErrorCode::mismatch);
}

TEST(Checkpointers, AreFoundByOlmosNames_O80) {
  const auto alone = solo_group();
  for (const std::string name : {"torch_new", "torch_legacy", "local"})
    EXPECT_EQ(to_string(build_sharded_checkpointer(name, *alone).kind()), name);
  EXPECT_EQ(
      build_sharded_checkpointer("", *alone, {.config = "sharded_checkpointer: local\n"}).kind(),
      CheckpointerKind::local);
  const auto refusal = [&](const std::string& name) {
    return code_of([&] { (void)build_sharded_checkpointer(name, *alone); });
  };
  EXPECT_EQ(refusal("olmo_core"), ErrorCode::unsupported);
  for (const std::string name : {"", "full", "Local", "dcp"})
    EXPECT_EQ(refusal(name), ErrorCode::invalid_argument) << name;
}

TEST(Checkpointers, RefuseBadOptions_O05) {
  const auto alone = solo_group();
  const auto refusal = [&](const CheckpointerOptions& options) {
    return code_of([&] { Checkpointer(CheckpointerKind::local, *alone, options); });
  };
  for (const int threads : {0, -1, 1025})
    EXPECT_EQ(refusal({.thread_count = threads}), ErrorCode::invalid_argument);
  EXPECT_EQ(refusal({.config = "sharded_checkpointer: torch_new"}), ErrorCode::invalid_argument);
  Checkpointer(CheckpointerKind::full, *alone, {.config = "sharded_checkpointer: torch_new"});
}

TEST(Checkpointers, AreToldByTheFiles) {
  const auto root = golden_path("fsdp1_uop1_ws2");
  EXPECT_EQ(checkpointer_of(root + "/local"), CheckpointerKind::local);
  EXPECT_EQ(checkpointer_of(root + "/legacy"), CheckpointerKind::torch_legacy);
  EXPECT_EQ(checkpointer_of(root), CheckpointerKind::torch_new);
  EXPECT_EQ(code_of([&] { (void)checkpointer_of(root + "/model.pt"); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([&] { (void)checkpointer_of("/nowhere"); }), ErrorCode::not_found);
}

// A node may have its own ranks' files alone.
TEST(Checkpointers, AreToldByThoseOfOneRank_F25) {
  const TemporaryDirectory directory;
  const auto root = golden_path("fsdp1_uop1_ws2");
  const auto path = directory.path() + "/part";
  fs::create_directories(path);
  fs::copy_file(root + "/legacy/rank1.pt", path + "/rank1.pt");
  EXPECT_EQ(checkpointer_of(path), CheckpointerKind::torch_legacy);
  run_ranks(2, [&](Group& group) {
    const auto own = group.rank() == 0 ? path : directory.path() + "/nowhere";
    EXPECT_EQ(checkpointer_of(own, group), CheckpointerKind::torch_legacy);
  });
}

}  // namespace
}  // namespace tessera
