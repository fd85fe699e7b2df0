#include "tessera/kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/open/kinds.h"
#include "conformance/errors.h"

namespace tessera {
namespace {

TEST(Kinds, ANameLeadsBackToItsKind) {
  for (const KindRow& row : kKinds) EXPECT_EQ(kind_named(to_string(row.kind)), row.kind);
  const Error error = error_of([] { (void)kind_named("dpc\n"); });
  EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(error.what(), testing::HasSubstr("'dpc\\n': dcp, torch, safetensors, olmo-full"));
}

TEST(Kinds, AFilesNameSaysItsKind) {
  EXPECT_EQ(kind_of_file_name("a/b.safetensors"), CheckpointKind::safetensors);
  for (const char* name : {"model.pt", "s3://bucket/model.pth"})
    EXPECT_EQ(kind_of_file_name(name), CheckpointKind::torch_file);
  for (const char* name : {"directory", "a.pt/b", "x.bin", ""})
    EXPECT_EQ(kind_of_file_name(name), std::nullopt) << name;
}

}  // namespace
}  // namespace tessera
