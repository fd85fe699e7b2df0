#include "storage/hub/hub_url.h"

#include <gtest/gtest.h>

#include "conformance/errors.h"

namespace tessera::hub {
namespace {

TEST(HubUrl, IsARepositoryAndWhatIsInIt) {
  const HubUrl all = parse_hub_url("hf://org/model");
  EXPECT_EQ(all.type, "models");
  EXPECT_EQ(all.repo, "org/model");
  EXPECT_EQ(all.revision, "main");
  EXPECT_EQ(all.path, "");
  EXPECT_TRUE(all.names_directory);

  const HubUrl file = parse_hub_url("hf://datasets/org/set@v1.0/dir/a b#1?.bin");
  EXPECT_EQ(file.type, "datasets");
  EXPECT_EQ(file.repo, "org/set");
  EXPECT_EQ(file.revision, "v1.0");
  EXPECT_EQ(file.path, "dir/a b#1?.bin");
  EXPECT_FALSE(file.names_directory);
  EXPECT_EQ(to_string(file), "hf://datasets/org/set@v1.0/dir/a b#1?.bin");
  EXPECT_EQ(to_string(above(file)), "hf://datasets/org/set@v1.0/dir");
  EXPECT_EQ(to_string(above(above(above(file)))), "hf://datasets/org/set@v1.0");

  EXPECT_EQ(parse_hub_url("hf://models/org/m").repo, "org/m");
  EXPECT_EQ(parse_hub_url("hf://spaces/org/m").type, "spaces");
}

TEST(HubUrl, RevisionsMayHaveSlashes) {
  for (const char* url : {"hf://o/m@refs%2Fpr%2F1/x", "hf://o/m@refs/pr/1/x"}) {
    EXPECT_EQ(parse_hub_url(url).revision, "refs/pr/1") << url;
    EXPECT_EQ(parse_hub_url(url).path, "x") << url;
  }
  EXPECT_EQ(parse_hub_url("hf://o/m@refs/convert/parquet").revision, "refs/convert/parquet");
  EXPECT_EQ(parse_hub_url("hf://o/m@refs/x").revision, "refs");
  // Behind the first slash of a path it is a character like others.
  EXPECT_EQ(parse_hub_url("hf://o/m/a@b").revision, "main");
  EXPECT_EQ(parse_hub_url("hf://o/m/a@b").path, "a@b");
}

TEST(HubUrl, SlashesAtTheEndNameADirectory) {
  EXPECT_EQ(parse_hub_url("hf://o/m/").path, "");
  EXPECT_TRUE(parse_hub_url("hf://o/m/").names_directory);
  EXPECT_EQ(parse_hub_url("hf://o/m/dir/").path, "dir");
  EXPECT_TRUE(parse_hub_url("hf://o/m/dir/").names_directory);
  EXPECT_EQ(to_string(parse_hub_url("hf://o/m/dir/")), "hf://o/m/dir");
}

TEST(HubUrl, AnythingElseIsRefused) {
  for (const char* url : {"hf://", "hf://gpt2", "hf://gpt2/", "hf:///m", "hf://o/..", "hf://o/m?x",
                          "hf://o/m@", "hf://o/m@/x", "hf://datasets/set", "hf://o p/m"}) {
    EXPECT_EQ(code_of([&] { (void)parse_hub_url(url); }), ErrorCode::invalid_argument) << url;
  }
  EXPECT_EQ(code_of([] { (void)parse_hub_url("hf://o/m@a%zz"); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { (void)parse_hub_url("hf://buckets/o/b"); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera::hub
