// P-04: saves without collectives.
#include "tessera/data_files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "checkpoint/test_support.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)

// The tree of one of three ranks; "b" is whole on each.
Value part_of(int rank, float first = 1) {
  return Value::dict({{"w", counting({7, 2}, chunk({7, 2}, rank, 3), first)},
                      {"b", counting({4}, whole({4}), first)},
                      {"none", counting({0, 3}, whole({0, 3}), 0)},
                      {"step", 3},
                      {"group", Value::dict({{"lr", 0.5}})}});
}

TEST(SavePart, PartsOfAllRanksAreACheckpoint) {
  const std::string directory = temporary_directory() + "/c";
  for (const int rank : {2, 0, 1}) {  // in any order
    const SaveResult result = save_part(part_of(rank), directory, rank);
    EXPECT_GE(result.files, 2U);
    EXPECT_GT(result.total_bytes, result.bytes_written);
  }
  EXPECT_FALSE(std::filesystem::exists(directory + "/.metadata"));
  for (const int rank : {0, 1, 2})
    EXPECT_TRUE(std::filesystem::exists(directory + "/__" + std::to_string(rank) + ".metadata"));
  const Checkpoint checkpoint = Checkpoint::open(directory);
  EXPECT_EQ(checkpoint.world_size, 3);
  const Value loaded = checkpoint.load();
  EXPECT_EQ(floats(loaded.at("w").as_tensor()), floats(counting({7, 2}, whole({7, 2}), 1)));
  EXPECT_EQ(floats(loaded.at("b").as_tensor()), floats(counting({4}, whole({4}), 1)));
  EXPECT_EQ(loaded.at("none").as_tensor().shape, (Shape{0, 3}));
  EXPECT_EQ(loaded.at("step").as_int(), 3);
  EXPECT_EQ(loaded.at("group").at("lr").as_real(), 0.5);
}

TEST(SavePart, AMissingRankIsNoticedByReaders) {
  const std::string directory = temporary_directory() + "/c";
  save_part(part_of(0), directory, 0);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory); }), ErrorCode::incomplete);
  save_part(part_of(2), directory, 2);
  EXPECT_EQ(code_of([&] { (void)Checkpoint::open(directory); }), ErrorCode::incomplete);
}

TEST(SavePart, AnEarlierPartIsKeptUnlessOverwritten) {
  const std::string directory = temporary_directory() + "/c";
  for (const int rank : {0, 1, 2}) save_part(part_of(rank), directory, rank);
  const auto before = names_in(directory);
  EXPECT_EQ(code_of([&] { save_part(part_of(1, 5), directory, 1); }), ErrorCode::already_exists);
  EXPECT_EQ(names_in(directory), before);
  for (int round = 0; round < 3; ++round) {
    for (const int rank : {0, 1, 2})
      save_part(part_of(rank, 5), directory, rank, {.overwrite = true});
  }
  // Parts that were replaced stay until the save after the next one.
  EXPECT_EQ(names_in(directory).size(), 2 * before.size() - 3);
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(floats(loaded.at("w").as_tensor()), floats(counting({7, 2}, whole({7, 2}), 5)));
}

// Readers would take the new one for the parts.
TEST(SavePart, PartsAreNotReplacedByASaveOfAllRanksUnlessOverwritten) {
  const std::string directory = temporary_directory() + "/c";
  for (const int rank : {0, 1, 2}) save_part(part_of(rank), directory, rank);
  const auto before = names_in(directory);
  const Error error = error_of([&] {
    run_ranks(3, [&](Group& group) { save(part_of(group.rank(), 5), directory, {}, group); });
  });
  EXPECT_EQ(error.code(), ErrorCode::already_exists);
  EXPECT_NE(std::string(error.what()).find("__0.metadata"), std::string::npos) << error.what();
  EXPECT_EQ(code_of([&] { (void)DcpDirectory(directory, {.overwrite = false}); }),
            ErrorCode::already_exists);
  EXPECT_EQ(names_in(directory), before);
  SaveOptions options;
  options.overwrite = true;
  run_ranks(3, [&](Group& group) { save(part_of(group.rank(), 5), directory, options, group); });
  const Value loaded = Checkpoint::open(directory).load();
  EXPECT_EQ(floats(loaded.at("w").as_tensor()), floats(counting({7, 2}, whole({7, 2}), 5)));
}

// Readers prefer a `.metadata`: the part would never be seen.
TEST(SavePart, IsRefusedBesideACheckpointOfAllRanks) {
  const std::string directory = temporary_directory() + "/c";
  save(Value::dict({{"n", 1}}), directory);
  for (const bool overwrite : {false, true}) {
    EXPECT_EQ(code_of([&] { save_part(part_of(0), directory, 0, {.overwrite = overwrite}); }),
              ErrorCode::already_exists);
  }
}

TEST(SavePart, FailuresLeaveNothing) {
  const std::string directory = temporary_directory() + "/c";
  SaveOptions options;
  options.progress = [](const Progress&) { throw std::runtime_error("no more"); };
  EXPECT_THROW(save_part(part_of(0), directory, 0, options), std::runtime_error);
  EXPECT_TRUE(names_in(directory).empty());
  for (const int rank : {-1, 1 << 20})  // readers would find no part of such a number
    EXPECT_EQ(code_of([&] { save_part(part_of(0), directory, rank); }),
              ErrorCode::invalid_argument);
  EXPECT_EQ(
      code_of([&] { save_part(part_of(0), directory, 0, {.kind = CheckpointKind::torch_file}); }),
      ErrorCode::unsupported);
}

TEST(SavePart, TellsOfItsPhases) {
  std::vector<std::string> phases;
  SaveOptions options;
  options.events = [&](const Event& event) {
    EXPECT_EQ(event.rank, 1);
    phases.emplace_back(event.phase);
  };
  save_part(part_of(1), temporary_directory() + "/c", 1, options);
  EXPECT_EQ(phases, (std::vector<std::string>{"plan", "write", "commit", "all"}));
}

}  // namespace
}  // namespace tessera
