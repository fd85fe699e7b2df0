// A run's directory: checkpoint-rows O-10; fault-rows C09, Q03.
#include "tessera/run_directory.h"

#include <gmock/gmock.h>

#include <thread>

#include "checkpoint/run/testing.h"
#include "storage/posix/replaced_directory.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
namespace fs = std::filesystem;

std::string name_of(const RunCheckpoint& checkpoint) {
  return run_checkpoint_name(checkpoint.step, checkpoint.unsharded);
}

std::vector<std::string> names_in(const Location& run) {
  std::vector<std::string> names;
  for (const RunCheckpoint& one : run_checkpoints(run)) names.push_back(name_of(one));
  return names;
}

std::string latest_name(const Location& run, const RunCheck& check = {}) {
  const LatestCheckpoint latest = latest_checkpoint(run, check);
  return latest.found ? name_of(*latest.found) : "none";
}

// A run on disk, in a store, and in a directory of a store.
std::vector<Location> empty_runs() {
  return {temporary_directory() + "/run", memory_store(), {memory_store(), "some/run"}};
}

std::string file_in(const std::string& directory, const std::string& suffix) {
  for (const auto& entry : fs::directory_iterator(directory)) {
    if (entry.path().string().ends_with(suffix)) return entry.path();
  }
  throw std::runtime_error("no such file");
}

TEST(RunDirectory, ListsItsCheckpointsNewestFirst_O10) {
  for (const Location& run : empty_runs()) {
    EXPECT_THAT(names_in(run), IsEmpty());
    for (const std::int64_t step : {2, 10, 9}) save_step(run_checkpoint(run, step).where, 1);
    save_step(run_checkpoint(run, 10, true).where, 1);
    for (const char* other : {"step010", "step-1", "step", "stepx", "step3-sharded", "latest",
                              "step4-tmp-0123456789ab", "step99999999999999999999"}) {
      save_step(directory_in(run, other), 1);
    }
    EXPECT_THAT(names_in(run), ElementsAre("step10", "step10-unsharded", "step9", "step2"));
  }
}

TEST(RunDirectory, TheLatestIsTheNewestThatIsWhole_O10) {
  const std::string run = temporary_directory();
  EXPECT_EQ(latest_name(run), "none");
  for (const std::int64_t step : {1, 2, 3}) save_step(run_checkpoint(run, step).where, 1);
  EXPECT_EQ(latest_name(run), "step3");
  fs::remove(run + "/step3/.metadata");  // a save that was killed
  EXPECT_THAT(latest_checkpoint(run).warnings, IsEmpty());
  EXPECT_EQ(latest_name(run), "step2");
  fs::resize_file(file_in(run + "/step2", ".distcp"), 100);
  const LatestCheckpoint latest = latest_checkpoint(run);
  EXPECT_EQ(name_of(*latest.found), "step1");
  ASSERT_EQ(latest.warnings.size(), 1U);
  EXPECT_THAT(latest.warnings[0], HasSubstr("step2 is damaged and passed over: incomplete"));
  fs::remove(file_in(run + "/step1", ".distcp"));
  const Error error = error_of([&] { (void)latest_checkpoint(run); });
  EXPECT_EQ(error.code(), ErrorCode::corrupt);
  EXPECT_EQ(error.path(), run);
  EXPECT_THAT(error.message(), HasSubstr("step2"));
  EXPECT_THAT(error.message(), HasSubstr("(and 1 more)"));
}

// OLMo asserts that there is one page of a thousand. Only the newest ones are looked into.
TEST(RunDirectory, OfAHundredThousandStepsTheNewestIsFound_O18) {
  const auto store = memory_store();
  constexpr int kSteps = 100'000;
  for (int step = 1; step < kSteps; ++step)
    put(*store, "step" + std::to_string(step) + "/.metadata", {}, IfExists::fail);
  save_step(run_checkpoint(store, kSteps).where, 1);
  put(*store, "step100001/__0_0.distcp", {}, IfExists::fail);  // a save that goes on
  EXPECT_EQ(latest_name(store), "step100000");
  EXPECT_EQ(run_checkpoints(store).size(), static_cast<std::size_t>(kSteps));
}

TEST(RunDirectory, OfOneStepTheShardedOneIsLatest_O10) {
  for (const Location& run : empty_runs()) {
    save_step(run_checkpoint(run, 5, true).where, 1);
    EXPECT_EQ(latest_name(run), "step5-unsharded");
    save_step(run_checkpoint(run, 5).where, 1);
    EXPECT_EQ(latest_name(run), "step5");
    const auto store = run_checkpoint(run, 5).where.store;
    if (!store) continue;
    put(*store, ".metadata", {}, IfExists::replace);
    EXPECT_EQ(latest_name(run), "step5-unsharded");
  }
}

TEST(RunDirectory, EveryKindCounts_O10) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const std::string run = temporary_directory();
    fs::copy(written(kind), run + "/step7", fs::copy_options::recursive);
    const LatestCheckpoint latest = latest_checkpoint(run, {.read_data = true});
    ASSERT_TRUE(latest.found);
    EXPECT_EQ(Checkpoint::open(latest.found->where).kind, kind);
    fs::remove(run + (kind == CheckpointKind::dcp ? "/step7/.metadata" : "/step7/config.yaml"));
    EXPECT_EQ(latest_name(run), "none");
  }
}

TEST(RunDirectory, WhatAKillLeftOfAReplacementIsTheCheckpoint) {
  const std::string run = temporary_directory();
  save_step(run + "/step5", 1);
  save_step(run + "/step4", 1);
  fs::rename(run + "/step5", run + "/step5.old-0123456789ab");
  const LatestCheckpoint latest = latest_checkpoint(run);
  EXPECT_EQ(name_of(*latest.found), "step5");
  EXPECT_EQ(latest.found->where.path, run + "/step5.old-0123456789ab");
  EXPECT_EQ(Checkpoint::open(latest.found->where).leaves.size(), 2U);
  // Not when there are two, as it is for who opens NAME.
  fs::copy(run + "/step5.old-0123456789ab", run + "/step5.old-0123456789ac",
           fs::copy_options::recursive);
  EXPECT_EQ(latest_name(run), "step4");
  save_step(run + "/step5", 2);
  EXPECT_EQ(latest_checkpoint(run).found->where.path, run + "/step5");
}

TEST(RunDirectory, LinksAreNotFollowed_C09) {
  const std::string run = temporary_directory();
  save_step(run + "/step5", 1);
  fs::create_directory_symlink("step9", run + "/latest");  // leads nowhere
  EXPECT_THAT(names_in(run), ElementsAre("step5"));
  EXPECT_EQ(latest_name(run), "step5");
}

// Two damages that keep the size: one that the digests at the file's end tell, and one that only
// reading does.
TEST(RunDirectory, DigestsAreCompared) {
  const std::string run = temporary_directory();
  save_step(run + "/step1", 1);
  save_step(run + "/step2", 1, 3 << 15);  // three blocks
  const std::string file = file_in(run + "/step2", ".distcp");
  const std::string good = text_of(file);
  std::string bad = good;
  bad[bad.size() - 60] ^= 1;  // in the tail
  write_text(file, bad);
  EXPECT_EQ(latest_name(run), "step1");
  bad = good;
  bad[bad.size() / 2] ^= 1;
  write_text(file, bad);
  EXPECT_EQ(latest_name(run), "step2");
  EXPECT_EQ(latest_name(run, {.read_data = true}), "step1");
}

TEST(RunDirectory, OfTorchNewTheDataFilesAreCompared) {
  const std::string run = temporary_directory();
  fs::copy(written(CheckpointKind::olmo_torch_new), run + "/step7", fs::copy_options::recursive);
  EXPECT_EQ(latest_name(run), "step7");
  const std::string file = file_in(run + "/step7/model_and_optim", ".distcp");
  std::string text = text_of(file);
  text[text.size() - 60] ^= 1;
  write_text(file, text);
  EXPECT_EQ(code_of([&] { (void)latest_checkpoint(run); }), ErrorCode::corrupt);
}

// That a store does not answer must not send a training back to an older checkpoint.
TEST(RunDirectory, AStoreThatFailsIsNoDamage) {
  const auto inner = memory_store();
  for (const std::int64_t step : {1, 2}) save_step(run_checkpoint(inner, step).where, 1);
  for (std::uint64_t calls = 0;; ++calls) {
    const auto store = std::make_shared<DyingStore>(inner, calls, DyingStore::Counts::everything);
    try {
      EXPECT_EQ(latest_name(store), "step2") << calls;
      EXPECT_GT(calls, 5U);
      return;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
    }
  }
}

TEST(RunDirectory, TwoWritersOfDifferentStepsBothCommit_C02) {
  const std::string run = temporary_directory();
  {
    std::vector<std::jthread> writers;
    for (const std::int64_t step : {7, 8}) {
      writers.emplace_back([&run, step] {
        save_step(run_checkpoint(run, step).where, static_cast<float>(step), 1 << 12);
      });
    }
  }
  EXPECT_EQ(latest_name(run, {.read_data = true}), "step8");
  for (const RunCheckpoint& one : run_checkpoints(run)) {
    const Value tree = Checkpoint::open(one.where).load();
    EXPECT_EQ(floats(tree.at("weight").as_tensor()).front(), static_cast<float>(one.step));
    EXPECT_EQ(tree.at("step").as_int(), one.step);
  }
}

// Who looks while checkpoints come to be finds one that is whole, or none.
TEST(RunDirectory, AReaderDuringSavesFindsWholeOnes_C03) {
  constexpr std::int64_t kSteps = 40;
  for (const Location& run : empty_runs()) {
    std::jthread writer([&run] {
      for (std::int64_t step = 0; step < kSteps; ++step)
        save_step(run_checkpoint(run, step).where, static_cast<float>(step));
    });
    std::int64_t before = -1;
    while (before < kSteps - 1) {
      const LatestCheckpoint latest = latest_checkpoint(run, {.read_data = true});
      EXPECT_THAT(latest.warnings, IsEmpty());
      if (!latest.found) continue;
      EXPECT_GE(latest.found->step, before);
      before = latest.found->step;
      EXPECT_EQ(Checkpoint::open(latest.found->where).load().at("step").as_int(), before);
    }
  }
}

TEST(RunDirectory, RankZeroLooksForAll) {
  const auto shared = memory_store();
  for (const std::int64_t step : {1, 2, 3}) save_step(run_checkpoint(shared, step, true).where, 1);
  put(*shared, "step3-unsharded/.metadata", {}, IfExists::replace);
  run_ranks(3, [&](Group& group) {
    // The others have a store that does not even answer.
    const Location run = group.rank() == 0
                             ? Location(shared)
                             : Location(std::make_shared<DyingStore>(
                                   memory_store(), 0, DyingStore::Counts::everything));
    const LatestCheckpoint latest = latest_checkpoint(run, {}, group);
    ASSERT_TRUE(latest.found);
    EXPECT_EQ(name_of(*latest.found), "step2-unsharded");
    EXPECT_EQ(to_string(latest.found->where), to_string(run) + "/step2-unsharded");
    EXPECT_EQ(latest.warnings.size(), 1U);
  });
}

TEST(RunDirectory, AllRanksHearThatAllAreDamaged) {
  const auto shared = memory_store();
  save_step(run_checkpoint(shared, 1).where, 1);
  put(*shared, "step1/.metadata", {}, IfExists::replace);
  run_ranks(2, [&](Group& group) {
    EXPECT_EQ(code_of([&] { (void)latest_checkpoint(shared, {}, group); }), ErrorCode::corrupt);
  });
  run_ranks(
      2, [&](Group& group) { EXPECT_FALSE(latest_checkpoint(memory_store(), {}, group).found); });
}

TEST(RunDirectory, BadNamesAreRefused) {
  EXPECT_EQ(code_of([] { (void)run_checkpoint_name(-1); }), ErrorCode::invalid_argument);
  EXPECT_EQ(code_of([] { (void)run_checkpoints("hdfs://host/run"); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([] { (void)run_checkpoints({memory_store(), "../run"}); }), ErrorCode::unsafe);
  EXPECT_EQ(code_of([] { (void)latest_checkpoint(memory_store(), {.threads = 0}); }),
            ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
