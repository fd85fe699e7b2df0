// OLMo's functions beside its checkpointers.
#include "tessera/checkpointer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <string>

#include "checkpointer/testing.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/convert.h"
#include "tessera/error.h"
#include "tessera/pytorch/state_dict.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using testing::copied_golden;
using testing::golden_path;
using testing::Layers;
using testing::make_layers;
using testing::run_mesh;
using testing::shard_layers;
using testing::Way;

void train(Layers& layers, AdamW& adam) {
  layers(torch::ones({2, 3})).square().sum().backward();
  adam.step();
  adam.zero_grad();
}

// Saved to two places, loaded elsewhere: the second one is whole without the first.
TEST(ModelAndOptimState, IsSavedAndLoaded_O11_O12) {
  const TemporaryDirectory directory;
  const auto path = directory.path() + "/run", remote = directory.path() + "/remote";
  FullState expected;
  Value state;
  run_mesh(2, [&](Mesh& mesh) {
    auto layers = make_layers();
    shard_layers(layers, Way::original, mesh);
    AdamW adam(sharded_parameters(layers), {.lr = 0.1});
    train(layers, adam);
    auto& group = mesh.checkpoint_group();
    const StateSaveOptions options{.upload_to = remote};
    save_fsdp_model_and_optim_state(path, layers, adam, group, options);
    const auto again =
        code_of([&] { save_fsdp_model_and_optim_state(path, layers, adam, group, options); });
    EXPECT_EQ(again, ErrorCode::already_exists);
    auto whole = full_state_dict(layers);
    auto whole_optim = full_optim_state_dict(layers, adam);
    if (mesh.rank() > 0) return;
    expected = whole;
    state = whole_optim;
  });
  fs::remove_all(path);
  run_mesh(3, [&](Mesh& mesh) {
    auto layers = make_layers(5);
    shard_layers(layers, Way::rows, mesh);
    AdamW adam(sharded_parameters(layers));
    auto& group = mesh.checkpoint_group();
    load_fsdp_model_and_optim_state(remote, layers, adam, group, {.load_optimizer_state = false});
    EXPECT_FALSE(adam.state(0, 0).defined());
    load_fsdp_model_and_optim_state(remote, layers, adam, group);
    const auto found = full_state_dict(layers);
    const auto found_optim = full_optim_state_dict(layers, adam);
    if (mesh.rank() > 0) return;
    for (const auto& item : expected)
      EXPECT_TRUE(torch::equal(found[item.key()], item.value())) << item.key();
    testing::expect_same(found_optim.at("state"), state.at("state"));
  });
  auto alone = make_layers(6);
  load_model_state(remote, alone);  // O-16
  for (const auto& item : alone->named_parameters())
    EXPECT_TRUE(torch::equal(expected[item.key()], item.value())) << item.key();
}

TEST(ModelAndOptimState, OfPyTorchsIsLoadedFromAStore_O12) {
  const TemporaryDirectory directory;
  const auto path = copied_golden(directory, CheckpointerKind::torch_new);
  auto one = make_layers(), other = make_layers(8);
  load_model_state(path, one);
  load_model_state(posix_store(path), other);
  for (const auto& item : one->named_parameters())
    EXPECT_TRUE(torch::equal(other->named_parameters()[item.key()], item.value()));
  EXPECT_EQ(code_of([&] { load_model_state(directory.path(), one); }), ErrorCode::not_found);
}

TEST(OptimState, InMemoryFillsShardedOptimizers_O13) {
  const Value optim = load_state_file(golden_path("fsdp1_uop1_ws2"), "optim.pt");
  for (const auto way : {Way::whole, Way::rows, Way::flat, Way::original}) {
    run_mesh(2, [&](Mesh& mesh) {
      auto layers = make_layers();
      shard_layers(layers, way, mesh);
      AdamW adam(sharded_parameters(layers), {.lr = 0.5});
      load_fsdp_optim_state(layers, adam, optim);
      EXPECT_EQ(adam.options(0).lr, 1e-3);
      const auto found = full_optim_state_dict(layers, adam);
      if (mesh.rank() == 0) testing::expect_same(found.at("state"), optim.at("state"));
    });
  }
  auto layers = make_layers();
  AdamW half({sharded_parameters(layers)[0]}, {.lr = 0.5});
  EXPECT_EQ(code_of([&] { load_fsdp_optim_state(layers, half, optim); }), ErrorCode::mismatch);
  EXPECT_EQ(half.options(0).lr, 0.5);
}

TEST(StateDict, IsASingleFile_O14) {
  const TemporaryDirectory directory;
  const auto remote = memory_store();
  const auto tree = Value::dict({{"step", 3}, {"list", Value::list({1, "a"})}});
  save_state_file(directory.path(), "sub/train.pt", tree, {.upload_to = remote});
  EXPECT_TRUE(load_state_file(directory.path(), "sub/train.pt") == tree);
  EXPECT_TRUE(load_state_file(remote, "sub/train.pt") == tree);
  EXPECT_EQ(code_of([&] { save_state_file(directory.path(), "sub/train.pt", tree); }),
            ErrorCode::already_exists);
  save_state_file(directory.path(), "sub/train.pt", Value::dict({{"step", 4}}),
                  {.save_overwrite = true});
  EXPECT_EQ(load_state_file(directory.path(), "sub/train.pt").at("step").as_int(), 4);
  EXPECT_EQ(code_of([&] { (void)load_state_file(directory.path(), "other.pt"); }),
            ErrorCode::not_found);
}

// As OLMo writes and looks for it: nested dicts under coded names.
TEST(StateDict, OfSafetensorsComesFirst_O15) {
  const TemporaryDirectory directory;
  const auto full = copied_golden(directory, CheckpointerKind::full);
  ConvertOptions how;
  how.to = CheckpointKind::olmo_full;
  how.olmo.safetensors = true;
  convert(full, directory.path() + "/made", how);
  const auto optim = load_state_file(full, "optim.pt");
  testing::expect_same(load_state_file(directory.path() + "/made", "optim.pt").at("state"),
                       optim.at("state"));
  fs::copy(directory.path() + "/made/model.safetensors", full + "/model.safetensors");
  save_state_file(full, "model.pt", Value::dict({{"is", "not looked at"}}),
                  {.save_overwrite = true});
  const auto model = load_state_file(full, "model.pt");
  testing::expect_same(model, load_state_file(golden_path("fsdp1_uop1_ws2"), "model.pt"));
}

}  // namespace
}  // namespace tessera
