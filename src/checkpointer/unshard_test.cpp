// Checkpoints of the four kinds become whole tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <string>

#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpointer.h"
#include "tessera/convert.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using testing::copied_golden;
using testing::golden_path;

// A checkpoint of the kind with a trainer state, of two ranks.
std::string made(const TemporaryDirectory& directory, CheckpointerKind kind, CheckpointKind files) {
  const auto full = copied_golden(directory, CheckpointerKind::full);
  save(Value::dict({{"global_step", 7}, {"rng", Value::dict({{"python", 1}})}}),
       full + "/train.pt");
  if (kind == CheckpointerKind::full) return full;
  ConvertOptions how;
  how.to = files;
  how.ranks = 2;
  convert(full, directory.path() + "/made", how);
  return directory.path() + "/made";
}

struct Case {
  CheckpointerKind kind;
  CheckpointKind files;
};

class Unsharded : public ::testing::TestWithParam<Case> {
 protected:
  [[nodiscard]] UnshardedState unshard(const UnshardOptions& options = {}) const {
    return Checkpointer(GetParam().kind, *group_).unshard_checkpoint(path_, options);
  }
  void SetUp() override { path_ = made(directory_, GetParam().kind, GetParam().files); }

  TemporaryDirectory directory_;
  std::unique_ptr<Group> group_ = solo_group();
  std::string path_;
  Value model_ = Checkpoint::open(golden_path("fsdp1_uop1_ws2/model.pt")).load();
  Value optim_ = Checkpoint::open(golden_path("fsdp1_uop1_ws2/optim.pt")).load();
};

TEST_P(Unsharded, HasWholeTensorsInMemory_O43_O62_O76) {
  const auto state = unshard();
  testing::expect_same(state.model, model_);
  ASSERT_TRUE(state.optim && state.trainer);
  const Value& states = state.optim->at("state");
  ASSERT_EQ(states.size(), 6U);
  const bool numbered = GetParam().kind == CheckpointerKind::local;  // as OLMo gives it
  const Value first = numbered ? Value(0) : Value("l1.weight");
  ASSERT_NE(states.find_key(first), nullptr);
  testing::expect_same(*states.find_key(first), optim_.at("state").at("l1.weight"));
  EXPECT_EQ(state.trainer->at("global_step").as_int(), 7);
  EXPECT_EQ(state.trainer->find("rng") == nullptr,
            GetParam().kind == CheckpointerKind::torch_legacy);
}

TEST_P(Unsharded, LeavesOutWhatNobodyWants) {
  const auto state = unshard({.load_optimizer_state = false, .load_trainer_state = false});
  testing::expect_same(state.model, model_);
  EXPECT_FALSE(state.optim);
  EXPECT_FALSE(state.trainer);
}

TEST_P(Unsharded, BecomesFiles) {
  const auto target = directory_.path() + "/whole";
  const Checkpointer checkpointer(GetParam().kind, *group_);
  checkpointer.unshard_checkpoint(path_, target, {});
  testing::expect_same(Checkpoint::open(target + "/model.pt").load(), model_);
  testing::expect_same(Checkpoint::open(target + "/optim.pt").load().at("state"),
                       optim_.at("state"));
  EXPECT_EQ(Checkpoint::open(target + "/train.pt").load().at("global_step").as_int(), 7);
  EXPECT_EQ(code_of([&] { checkpointer.unshard_checkpoint(path_, target, {}); }),
            ErrorCode::already_exists);
  Checkpointer(GetParam().kind, *group_, {.save_overwrite = true})
      .unshard_checkpoint(path_, target, {.load_optimizer_state = false});
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(target + "/optim.pt"); }), ErrorCode::not_found);
}

TEST_P(Unsharded, IsOfThisKindAlone) {
  const auto other =
      GetParam().kind == CheckpointerKind::local ? CheckpointerKind::full : CheckpointerKind::local;
  const Checkpointer checkpointer(other, *group_);
  EXPECT_EQ(code_of([&] { (void)checkpointer.unshard_checkpoint(path_); }),
            ErrorCode::invalid_argument);
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, Unsharded,
    ::testing::Values(Case{CheckpointerKind::full, CheckpointKind::olmo_full},
                      Case{CheckpointerKind::torch_new, CheckpointKind::olmo_torch_new},
                      Case{CheckpointerKind::torch_legacy, CheckpointKind::olmo_legacy},
                      Case{CheckpointerKind::local, CheckpointKind::olmo_local}),
    [](const auto& of) { return std::string(to_string(of.param.kind)); });

}  // namespace
}  // namespace tessera
