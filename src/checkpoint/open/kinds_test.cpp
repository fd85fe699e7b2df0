#include "checkpoint/open/kinds.h"

#include <filesystem>
#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/test_support.h"
#include "conformance/store_conformance.h"
#include "tessera/checkpoint.h"
#include "tessera/convert.h"
#include "tessera/restore.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

TEST(Kinds, ANameLeadsBackToItsKind) {
  for (const KindRow& row : kKinds) EXPECT_EQ(kind_named(to_string(row.kind)), row.kind);
  const Error error = error_of([] { (void)kind_named("dpc\n"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.what(), testing::HasSubstr("'dpc\\n': dcp, torch, safetensors, olmo-full"));
}

TEST(Kinds, AFilesNameSaysItsKind) {
  EXPECT_EQ(kind_of_file_name("a/b.safetensors"), CheckpointKind::safetensors);
  for (const char* name : {"model.pt", "s3://bucket/model.pth", "pytorch_model.bin", "x.ckpt"})
    EXPECT_EQ(kind_of_file_name(name), CheckpointKind::torch_file);
  for (const char* name : {"directory", "a.pt/b", "x.npz", "x.", ".bin", ""})
    EXPECT_EQ(kind_of_file_name(name), std::nullopt) << name;
}

TEST(Kinds, ADirectorysNameIsNoFiles) {
  const std::string there = temporary_directory() + "/run.ckpt";
  EXPECT_EQ(kind_of_target(there), CheckpointKind::torch_file);
  EXPECT_EQ(kind_of_target(there + "/"), std::nullopt);
  std::filesystem::create_directory(there);
  EXPECT_EQ(kind_of_target(there), std::nullopt);
  EXPECT_EQ(kind_of_target("file://" + there), std::nullopt);
  EXPECT_EQ(kind_of_target({memory_store(), "run.ckpt"}), CheckpointKind::torch_file);
}

// What is no rank's file makes no directory a checkpoint, and a checkpoint no other one.
TEST(Kinds, WhatIsNotReadIsNotSeen) {
  for (const std::string prefix : {"rank", "model/rank", "model_world_size_2_rank_"}) {
    for (const char* number : {"", "x", "00", "01", "-1", "+1", " 1", "1048576", "2147483648",
                               "99999999999999999999", "0.pt.tmp", "0_"}) {
      const auto store = memory_store();
      const std::string name = prefix + number + ".pt";
      put(*store, name, {}, IfExists::fail);
      EXPECT_EQ(code_of([&] { (void)Checkpoint::open(store); }), ErrorCode::not_found) << name;
      EXPECT_EQ(olmo_kind_at(store), std::nullopt) << name;
    }
  }
  const auto store = memory_store();
  put(*store, "__x.metadata", {}, IfExists::fail);
  put(*store, "__0/.metadata", {}, IfExists::fail);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(store); }), ErrorCode::not_found);
}

// Whether a program that asks for the checkpoint there may begin afresh.
bool may_begin(const Location& where) {
  const Error error = error_of([&] { (void)Checkpoint::open(where); });
  EXPECT_EQ(error.code(), ErrorCode::not_found);
  return error.is_no_checkpoint();
}

TEST(NoCheckpoint, IsSaidOfAPlaceWithNothingOfOne) {
  const TemporaryDirectory directory;
  const std::string& path = directory.path();
  for (const Location& where : {Location(path + "/none"), Location(path), Location(memory_store()),
                                Location(memory_store(), "a.pt")})
    EXPECT_TRUE(may_begin(where)) << to_string(where);
  put(*posix_store(path), "log.txt", {}, IfExists::fail);
  EXPECT_TRUE(may_begin(path));
  for (const char* name : {"/none/x.pt", "/none/", "/none//step"})
    EXPECT_TRUE(may_begin(path + name)) << name;
}

// What is there may be all that is left of a good run.
TEST(NoCheckpoint, IsNotSaidOfAPlaceWithAPartOfOne) {
  const TemporaryDirectory directory;
  const std::string& path = directory.path();
  std::filesystem::create_symlink("step100", path + "/latest");
  put(*posix_store(path), "log.txt", {}, IfExists::fail);
  for (const char* name : {"", "/latest", "/latest/", "/latest/model", "/log.txt/"})
    EXPECT_FALSE(may_begin(path + name)) << name;
  EXPECT_FALSE(may_begin(Location(posix_store(path), "latest")));
  std::filesystem::remove(path + "/latest");
  EXPECT_TRUE(may_begin(path));
  std::filesystem::create_directory(path + "/.metadata");
  EXPECT_FALSE(may_begin(path));
  for (const char* name : {"weights.bin", "model/last.ckpt", "model_and_optim/x.pt", "a.pth",
                           "step100/x.distcp", "unet/model.safetensors", "optimizer.pth.tar",
                           "model.safetensors.part", "weights.gguf", "state.pkl", "model.PT"}) {
    const auto store = memory_store();
    put(*store, name, {}, IfExists::fail);
    EXPECT_FALSE(may_begin(store)) << name;
  }
  const auto unfinished = memory_store();
  put(*unfinished, "__0_0.distcp", {}, IfExists::fail);
  const Error error = error_of([&] { (void)Checkpoint::open(unfinished); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_FALSE(error.is_no_checkpoint());
}

TEST(NoCheckpoint, IsNotSaidWhereSomethingIsMissingInOne) {
  const auto store = memory_store();
  const auto other = memory_store();
  run_ranks(2, [&](Group& group) {
    save(Value::dict({{"step", 1}}), store, group);
    for (const char* key : {"optim", "layer"}) {
      Value tree = Value::dict({{key, Value::dict({{"lr", 0.1}})}});
      const Error error = error_of([&] { load(tree, store, group); });
      EXPECT_FALSE(error.is_no_checkpoint()) << error.what();
    }
    Value tree = Value::dict({{"step", 1}});
    const Error error = error_of([&] { load(tree, other, group); });
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_TRUE(error.is_no_checkpoint()) << error.what();
  });
  const Checkpoint checkpoint = Checkpoint::open(store);
  EXPECT_FALSE(error_of([&] { (void)checkpoint.tensor("w"); }).is_no_checkpoint());
}

// Another rank than the first may look into another directory.
TEST(NoCheckpoint, IsWhatRankZeroSays) {
  const Error none = Error(ErrorCode::not_found, "none").as_no_checkpoint();
  const Error lacks = Error(ErrorCode::not_found, "lacks");
  EXPECT_TRUE(Error::from_peers({{0, none}}, 4).is_no_checkpoint());
  EXPECT_TRUE(Error::from_peers({{0, none}, {1, none}}, 2).is_no_checkpoint());
  EXPECT_FALSE(Error::from_peers({{1, none}}, 4).is_no_checkpoint());
  EXPECT_FALSE(Error::from_peers({{0, none}, {1, lacks}}, 2).is_no_checkpoint());
  EXPECT_FALSE(Error::from_peers({{0, none}}, 2, 1).is_no_checkpoint());
}

const char* const kIndex =
    R"({"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}})";

// The names in a directory that are of its checkpoint.
std::vector<std::string> own(const std::map<std::string, std::string>& directory) {
  const auto store = memory_store();
  for (const auto& [name, text] : directory) put(*store, name, bytes_of(text), IfExists::fail);
  const Belonging belongs(*store);
  std::vector<std::string> found;
  for (const auto& [name, text] : directory)
    if (belongs(name)) found.push_back(name);
  EXPECT_EQ(found.empty(), !holds_checkpoint(store->list()));
  return found;
}

using Names = std::vector<std::string>;

TEST(Belonging, FilesOfEveryKindHaveKnownNames) {
  for (const char* name : {".metadata",
                           "__0_0.distcp",
                           "__3_1_0123456789ab.distcp",
                           "__2.metadata",
                           ".metadata.tmp",
                           "tessera-digests.json",
                           "tessera-0123.json",
                           "config.yaml",
                           "metadata.yaml",
                           "model.pt",
                           "optim.pt",
                           "train.pt",
                           "other.pt",
                           "rank0.pt",
                           "rank17.pt",
                           "model/rank0.pt",
                           "optim/rank3.pt",
                           "train/rank3.pt",
                           "model_and_optim/.metadata",
                           "model_and_optim/__0_0.distcp",
                           "model_and_optim/tessera-0123.json",
                           "pytorch_model_fsdp_0/.metadata",
                           "optimizer_3/__0_0.distcp",
                           "model_world_size_2_rank_0.pt",
                           "extra_state_world_size_16_rank_3.pt",
                           "model.safetensors",
                           "optim.safetensors",
                           "model.safetensors.index.json",
                           "pytorch_model.bin",
                           "pytorch_model.bin.index.json"})
    EXPECT_EQ(own({{name, "{}"}}), Names{name});
}

TEST(Belonging, WhateverElseLiesThereIsSomebodys) {
  for (const char* name :
       {"notes.txt", "config.json", "tokenizer.json", "rank.pt", "rankings.pt", "rank0.pt.old",
        "best.pt", "eval/model.pt", "eval/rank0.pt", "eval/.metadata", "model/notes.md",
        "model/model.pt", "train/log.txt", "model_and_optim/rank0.pt", "eval/a.safetensors",
        "model_world_size_2.pt", "wandb/run/config.yaml"})
    EXPECT_EQ(own({{name, ""}, {"model.pt", ""}}), Names{"model.pt"}) << name;
}

TEST(Belonging, OfASetItsIndexSpeaks) {
  EXPECT_EQ(own({{"part-a.safetensors", ""},
                 {"part-b.safetensors", ""},
                 {"adapter.safetensors", ""},
                 {"model.safetensors.index.json", kIndex}}),
            (Names{"model.safetensors.index.json", "part-a.safetensors", "part-b.safetensors"}));
  // A single one of another name does too. Beside the usual one it is another set's.
  EXPECT_EQ(own({{"part-a.safetensors", ""}, {"x.safetensors.index.json", kIndex}}),
            (Names{"part-a.safetensors", "x.safetensors.index.json"}));
  EXPECT_EQ(own({{"part-a.safetensors", ""},
                 {"model.safetensors.index.json", "{"},
                 {"model.fp16.safetensors.index.json", kIndex}}),
            Names{"model.safetensors.index.json"});
  const char* const torch = R"({"weight_map": {"a": "a-1.bin", "b": "a-2.bin"}})";
  EXPECT_EQ(own({{"a-1.bin", ""}, {"a-2.bin", ""}, {"c.bin", ""}, {"a.bin.index.json", torch}}),
            (Names{"a-1.bin", "a-2.bin", "a.bin.index.json"}));
  // As the opener has it, that of safetensors comes first.
  EXPECT_EQ(own({{"a-1.bin", ""},
                 {"part-a.safetensors", ""},
                 {"model.safetensors.index.json", kIndex},
                 {"a.bin.index.json", torch}}),
            (Names{"model.safetensors.index.json", "part-a.safetensors"}));
}

TEST(Belonging, WithoutAnIndexAllOfThemAreTheCheckpoint) {
  EXPECT_EQ(own({{"a.safetensors", ""},
                 {"b.safetensors", ""},
                 {"b.safetensors.tessera.json", ""},
                 {"notes.txt", ""}}),
            (Names{"a.safetensors", "b.safetensors", "b.safetensors.tessera.json"}));
  // But not beside a checkpoint that has another name.
  EXPECT_EQ(own({{"adapter.safetensors", ""}, {"model.safetensors", ""}}),
            Names{"model.safetensors"});
  EXPECT_EQ(own({{"adapter.safetensors", ""}, {"rank0.pt", ""}}), Names{"rank0.pt"});
}

// As docs/guide/what-is-in-a-directory.md has them.
TEST(Belonging, OtherFormsAreTheCheckpointWhereNothingElseIs) {
  EXPECT_EQ(own({{"a.safetensors", ""},
                 {"._a.safetensors", ""},
                 {"adapter_model.bin", ""},
                 {"adapter_model.safetensors", ""},
                 {"consolidated.safetensors", ""}}),
            Names{"a.safetensors"});
  EXPECT_EQ(own({{"adapter_model.bin", ""}, {"adapter_model.safetensors", ""}, {"b.bin", ""}}),
            (Names{"adapter_model.bin", "adapter_model.safetensors"}));
  EXPECT_EQ(own({{"consolidated.safetensors", ""}}), Names{"consolidated.safetensors"});
  EXPECT_EQ(own({{"adapter_model.safetensors", ""}, {"diffusion_pytorch_model.bin", ""}}),
            Names{"diffusion_pytorch_model.bin"});
}

}  // namespace
}  // namespace tessera
