#include "checkpoint/open/belonging.h"

#include <gtest/gtest.h>

#include <map>

#include "conformance/store_conformance.h"

namespace tessera {
namespace {

const char* const kIndex =
    R"({"weight_map": {"a": "part-a.safetensors", "b": "part-b.safetensors"}})";

// Of the names that a directory has, those of its checkpoint.
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

}  // namespace
}  // namespace tessera
