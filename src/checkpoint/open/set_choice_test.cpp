// Which of the files that lie in a directory are the checkpoint, and what is read without an index.
#include "checkpoint/open/set_choice.h"

#include <gmock/gmock.h>

#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/open/directory.h"
#include "checkpoint/open/testing.h"
#include "tessera/copy.h"
#include "tessera/verify.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace testing_support;  // NOLINT(google-build-using-namespace)
using testing::Contains;
using testing::HasSubstr;

// A file of torch.save with one vector.
void write_torch(const std::string& path, const std::string& name, float first) {
  save(Value::dict({{name, counting({2}, whole({2}), first)}}), path);
}

// As peft, and as diffusers.
TEST(SetChoice, AnAdapterOfTorchIsReadWhereNoModelIs) {
  for (const std::string name : {"adapter_model.bin", "diffusion_pytorch_model.bin"}) {
    const fs::path directory = temporary_directory();
    write_torch(directory / name, "a", 1);
    write_torch(directory / "training_args.bin", "b", 9);
    const auto checkpoint = Checkpoint::open(directory.string());
    EXPECT_EQ(checkpoint.kind, CheckpointKind::torch_file);
    EXPECT_EQ(numbers_of(checkpoint, "a"), (std::vector<float>{1, 2}));
    EXPECT_EQ(state_of(checkpoint, name), "used");
    EXPECT_EQ(state_of(checkpoint, "training_args.bin"), "not part of it");
    EXPECT_TRUE(verify(directory.string()).findings.empty());
  }
}

TEST(SetChoice, AnAdapterOfTorchIsBesideAModel) {
  const std::string directory = temporary_directory();
  write_torch(directory + "/adapter_model.bin", "a", 1);
  write_vectors(directory + "/adapter_model.safetensors", {{"b", {3}}});
  const auto adapter = Checkpoint::open(directory);
  EXPECT_EQ(adapter.names(), std::vector<std::string>{"b"});
  EXPECT_EQ(state_of(adapter, "adapter_model.bin"), "superseded");
  write_torch(directory + "/pytorch_model.bin", "c", 1);
  const auto torch = Checkpoint::open(directory);
  EXPECT_EQ(torch.names(), std::vector<std::string>{"c"});
  EXPECT_EQ(state_of(torch, "adapter_model.bin"), "not part of it");
  EXPECT_EQ(state_of(torch, "adapter_model.safetensors"), "not part of it");
  write_vectors(directory + "/model.safetensors", {{"d", {4}}});
  const auto model = Checkpoint::open(directory);
  EXPECT_EQ(model.names(), std::vector<std::string>{"d"});
  EXPECT_EQ(state_of(model, "adapter_model.bin"), "not part of it");
  EXPECT_EQ(state_of(model, "pytorch_model.bin"), "superseded");
  EXPECT_THAT(model.warnings, Contains(HasSubstr("adapter_model.bin")));
}

TEST(SetChoice, TheTableOfOneFileOfTorchHasWhatLiesBeside) {
  const std::string directory = temporary_directory();
  write_torch(directory + "/pytorch_model.bin", "a", 1);
  write_torch(directory + "/optimizer.pt", "b", 9);
  write_text(directory + "/config.json", "{}");
  const auto checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.path, directory);
  EXPECT_EQ(state_of(checkpoint, "pytorch_model.bin"), "used");
  EXPECT_EQ(state_of(checkpoint, "optimizer.pt"), "not part of it");
  EXPECT_EQ(state_of(checkpoint, "config.json"), "not part of it");
  // Whoever names the file asks for nothing else.
  const auto file = Checkpoint::open(directory + "/pytorch_model.bin");
  EXPECT_EQ(file.directory().size(), 1U);
}

// Two faults, each with its way on.
TEST(SetChoice, AnIndexOfNothingBesideFilesWithTrailingBytes) {
  const std::string directory = two_shards();
  fs::rename(directory + "/A.safetensors", directory + "/one.safetensors");
  fs::rename(directory + "/B.safetensors", directory + "/two.safetensors");
  write_text(directory + "/two.safetensors", text_of(directory + "/two.safetensors") + "tail");
  const auto refusal = [&](const OpenOptions& options) {
    return error_of([&] { (void)Checkpoint::open(directory, options); });
  };
  EXPECT_THAT(refusal({}).message(), HasSubstr("hold all 3 tensors: --ignore-index"));
  EXPECT_THAT(refusal({.ignore_index = true}).message(), HasSubstr("--accept trailing-bytes"));
  const auto checkpoint =
      Checkpoint::open(directory, {.ignore_index = true, .accept = {"trailing-bytes"}});
  EXPECT_EQ(numbers_of(checkpoint, "c"), (std::vector<float>{4, 5, 6}));
}

std::string shard_at(int begin) {
  return R"({"DCP_SHARDING_INFO": "{\"t\": {\"saved_offsets\": [)" + std::to_string(begin) +
         R"(]}}", "DCP_VERSION": "1.0"})";
}

// The index is ignored, but it tells that there was more: nobody knows how far the shards reached.
TEST(SetChoice, WithoutTheIndexATensorInShardsIsNeverHalfOfIt) {
  const std::string directory = temporary_directory();
  write_one(directory + "/A.safetensors", shard_at(0), "t", {1, 2});
  write_one(directory + "/B.safetensors", shard_at(2), "t", {3, 4});
  write_vectors(directory + "/C.safetensors", {{"whole", {5}}});
  write_map(directory + kIndexFile,
            {{"t", "A.safetensors"}, {"u", "B.safetensors"}, {"whole", "C.safetensors"}});
  write_map(directory + "/consolidated.safetensors.index.json", {{"t", "consolidated-1"}});
  const auto open = [&](bool partial) {
    return Checkpoint::open(directory, {.partial = partial, .ignore_index = true});
  };
  EXPECT_EQ(numbers_of(open(false), "t"), (std::vector<float>{1, 2, 3, 4}));
  fs::remove(directory + "/B.safetensors");
  const auto checkpoint = open(false);
  EXPECT_EQ(numbers_of(checkpoint, "whole"), std::vector<float>{5});
  const Error error = error_of([&] { (void)checkpoint.tensor("t"); });
  EXPECT_EQ(error.code(), ErrorCode::incomplete);
  EXPECT_THAT(error.path(), HasSubstr("B.safetensors"));
  EXPECT_THAT(error.message(), HasSubstr("--partial"));
  EXPECT_EQ(state_of(checkpoint, "B.safetensors"), "missing");
  EXPECT_EQ(verify(directory, {.open = {.ignore_index = true}}).findings.size(), 1U);
  EXPECT_EQ(open(true).names(), std::vector<std::string>{"whole"});
  // Whole tensors need nothing that is not here.
  fs::remove(directory + "/A.safetensors");
  EXPECT_EQ(open(false).warnings.size(), 1U);  // of the other form
  // What is wrong with an index that is ignored is ignored.
  write_text(directory + kIndexFile, "{");
  EXPECT_EQ(numbers_of(open(false), "whole"), std::vector<float>{5});
}

// How it is opened says when it counts as whole; what is copied is all that lies there.
TEST(SetChoice, CopiesTakeTheOptionsOfOpening) {
  const std::string stray = two_shards();
  write_vectors(stray + "/model.safetensors", {{"a", {8, 8}}});
  const auto target = [] { return temporary_directory() + "/to"; };
  EXPECT_EQ(code_of([&] { (void)copy(stray, target()); }), ErrorCode::conflict);
  EXPECT_EQ(copy(stray, target(), {.open = {.ignore_index = true}}).files, 4U);

  const std::string tailed = two_shards();
  write_text(tailed + "/A.safetensors", text_of(tailed + "/A.safetensors") + "tail");
  const Error error = error_of([&] { (void)copy(tailed, target()); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_THAT(error.message(), HasSubstr("; --accept trailing-bytes"));
  const std::string copied = target();
  (void)copy(tailed, copied, {.open = {.accept = {"trailing-bytes"}}});
  EXPECT_EQ(text_of(copied + "/A.safetensors"), text_of(tailed + "/A.safetensors"));

  for (const char* file : {"/A.safetensors", "/B.safetensors"})
    fs::rename(stray + file, stray + file + ".old");
  fs::remove(stray + "/model.safetensors");
  EXPECT_EQ(code_of([&] { (void)copy(stray, target()); }), ErrorCode::incomplete);
  EXPECT_EQ(copy(stray, target(), {.open = {.partial = true}}).files, 3U);
  const OpenOptions ranked{.rank = 0};
  EXPECT_EQ(code_of([&] { (void)copy(tailed, target(), {.open = ranked}); }),
            ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([&] {
              (void)copy(copied + "/B.safetensors", target(), {.open = {.ignore_index = true}});
            }),
            ErrorCode::invalid_argument);
}

TEST(SetChoice, AStateOfVllmIsCopiedWithAllRanks) {
  const std::string directory = temporary_directory();
  for (const char* rank : {"0", "1"})
    write_vectors(directory + "/model-rank-" + rank + "-part-0.safetensors", {{"a", {1}}});
  EXPECT_EQ(copy(directory, temporary_directory() + "/to").files, 2U);
}

// Their names alone are those of OLMo's, which have a marker.
TEST(SetChoice, PlainFilesOfRanksAreCopiedWithoutAMarker) {
  const std::string directory = temporary_directory();
  write_torch(directory + "/rank0.pt", "a", 1);
  ASSERT_EQ(Checkpoint::open(directory).kind, CheckpointKind::rank_files);
  const std::string target = temporary_directory() + "/to";
  EXPECT_EQ(copy(directory, target, {.allow_incomplete = true}).files, 1U);
}

TEST(SetChoice, DigestsAreOfWhatTheOptionsChoose) {
  const std::string directory = two_shards();
  write_one(directory + "/one.safetensors", "{}", "d", {1});
  fs::rename(directory + "/one.safetensors", directory + "/model.safetensors");
  write_text(directory + "/model.safetensors", text_of(directory + "/model.safetensors") + "tail");
  EXPECT_EQ(code_of([&] { (void)seal(directory); }), ErrorCode::conflict);
  const OpenOptions how{.ignore_index = true, .accept = {"trailing-bytes"}};
  EXPECT_EQ(seal(directory, {.open = how}).files, 1U);
  EXPECT_TRUE(seal(directory, {.open = how}).was_sealed);
  EXPECT_EQ(numbers_of(Checkpoint::open(directory, how), "d"), std::vector<float>{1});
  patch(directory + "/model.safetensors", "tail", "tall");
  EXPECT_EQ(verify(directory, {.open = how}).findings.size(), 1U);
  for (const OpenOptions& wrong : {OpenOptions{.partial = true}, OpenOptions{.rank = 0}})
    EXPECT_EQ(code_of([&] { (void)seal(directory, {.open = wrong}); }),
              ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
