#include "tessera/kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/open/kinds.h"
#include "checkpoint/test_support.h"
#include "tessera/checkpoint.h"
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

}  // namespace
}  // namespace tessera
