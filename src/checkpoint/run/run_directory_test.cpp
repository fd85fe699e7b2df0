#include <thread>

#include <gmock/gmock.h>

#include "checkpoint/run/testing.h"
#include "storage/posix/lock.h"
#include "storage/posix/replaced_directory.h"
#include "tessera/run_directory.h"

namespace tessera {

// A run's directory: checkpoint-rows O-10; fault-rows C09, Q03.

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

// What a run keeps of its checkpoints: fault-rows C06, C11, C12, C13.

namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
namespace fs = std::filesystem;

std::set<std::string> names_below(const std::string& directory) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(directory))
    names.insert(entry.path().filename().string());
  return names;
}

void save_steps(const Location& run, const std::vector<std::int64_t>& steps) {
  for (const std::int64_t step : steps) save_step(run_checkpoint(run, step).where, 1);
}

TEST(Retain, EachListKeepsItsOwn) {
  for (const Location& run : {Location(temporary_directory()), Location(memory_store()),
                              Location(memory_store(), "some/run")}) {
    save_steps(run, {10, 11, 20, 21, 22, 30, 31});
    for (const std::int64_t step : {10, 20, 30})
      save_step(run_checkpoint(run, step, true).where, 1);
    const Retention retention{
        .sharded = 2, .unsharded = 1, .ephemeral = 2, .is_ephemeral = [](std::int64_t step) {
          return step % 10 != 0;
        }};
    const RetentionReport report = retain(run, run_checkpoint(run, 31), retention);
    EXPECT_THAT(names_in(run),
                ElementsAre("step31", "step30", "step30-unsharded", "step22", "step20"));
    EXPECT_THAT(report.removed,
                ElementsAre("step21", "step20-unsharded", "step11", "step10", "step10-unsharded"));
    EXPECT_THAT(report.warnings, IsEmpty());
    // As OLMo's trainer removes its ephemeral ones once there is another.
    (void)retain(run, run_checkpoint(run, 30),
                 {.ephemeral = 0, .is_ephemeral = retention.is_ephemeral});
    EXPECT_THAT(names_in(run), ElementsAre("step31", "step30", "step30-unsharded", "step20"));
  }
}

TEST(Retain, WithoutLimitsEverythingStays) {
  const std::string run = temporary_directory();
  save_steps(run, {1, 2, 3});
  fs::create_directories(run + "/step0");
  EXPECT_THAT(retain(run, run_checkpoint(run, 3)).removed, IsEmpty());
  EXPECT_EQ(names_below(run).size(), 4U);
}

// Nothing goes before the new one is there and found whole (fault-rows C12).
TEST(Retain, NothingGoesWhileTheNewOneIsNotWhole_C12) {
  const auto store = memory_store();
  save_steps(store, {1, 2});
  const auto damage = [&](const std::string& name, ErrorCode code) {
    put(*store, name, {}, IfExists::replace);
    const Error error =
        error_of([&] { (void)retain(store, run_checkpoint(store, 2), {.sharded = 1}); });
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_THAT(std::string(error.what()), HasSubstr("step2"));
  };
  for (const ObjectInfo& object : store->list("step2")) {
    if (object.name.ends_with(".distcp")) damage(object.name, ErrorCode::incomplete);
  }
  EXPECT_EQ(code_of([&] { (void)retain(store, run_checkpoint(store, 9), {.sharded = 1}); }),
            ErrorCode::incomplete);
  EXPECT_TRUE(Checkpoint::open(run_checkpoint(store, 1).where).find("weight") != nullptr);
}

TEST(Retain, DamagedOnesTakeNoPlace_C12) {
  const auto store = memory_store();
  save_steps(store, {1, 2, 3});
  put(*store, "step2/.metadata", {}, IfExists::replace);
  EXPECT_THAT(retain(store, run_checkpoint(store, 3), {.sharded = 2}).removed,
              ElementsAre("step2"));
  EXPECT_THAT(names_in(store), ElementsAre("step3", "step1"));
}

// The removal of each kind ends after each of its calls. What is left is whole, or no checkpoint at
// all, not even for who asks for no marker.
TEST(Retain, AKillLeavesNoHalfOfACheckpoint_C13) {
  for (const CheckpointKind kind : marked_kinds()) {
    SCOPED_TRACE(to_string(kind));
    const auto from = posix_store(written(kind));
    std::size_t partial = 0;
    for (std::uint64_t calls = 0;; ++calls) {
      const auto inner = memory_store();
      copy_objects(from, *inner, "step1/");
      copy_objects(from, *inner, "step2/");
      const std::size_t all = inner->list("step1").size();
      const auto dying = std::make_shared<DyingStore>(inner, calls);
      try {
        (void)retain(dying, run_checkpoint(dying, 2), {.sharded = 1});
        EXPECT_TRUE(inner->list("step1").empty());
        EXPECT_EQ(calls, all + 1);  // and a sync
        break;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      }
      const LatestCheckpoint latest = latest_checkpoint(inner, {.read_data = true});
      EXPECT_EQ(latest.found->step, 2);
      EXPECT_THAT(latest.warnings, IsEmpty());
      const std::size_t left = inner->list("step1").size();
      if (left == 0 || left == all) continue;
      EXPECT_THAT(names_in(inner), ElementsAre("step2"));
      if (left + 2 > all) continue;
      ++partial;
      EXPECT_THROW((void)Checkpoint::open(run_checkpoint(inner, 1).where), Error) << left;
    }
    EXPECT_GT(partial, 0U);
  }
}

TEST(Retain, WhatKillsLeftGoesUnlessItsWriterLives_C06) {
  const std::string run = temporary_directory();
  save_steps(run, {5, 6});
  for (const char* left :
       {"step1", "step2-tmp-0123456789ab", "step3-tmp-0123456789ab", "step6.old-0123456789ab",
        "step6-tmp-0123456789ab", "step7-tmp-0123456789ab", "steps", "step2-tmp-x"}) {
    fs::create_directories(run + "/" + left);
    write_text(run + "/" + left + "/__0_0.distcp", "half");
  }
  const LockedFd writer = locked_directory(run + "/step3-tmp-0123456789ab");
  const RetentionReport report = retain(run, run_checkpoint(run, 6), {.sharded = 3});
  EXPECT_THAT(report.removed,
              UnorderedElementsAre("step1", "step2-tmp-0123456789ab", "step6.old-0123456789ab"));
  EXPECT_THAT(
      names_below(run),
      UnorderedElementsAre("step5", "step6", "step3-tmp-0123456789ab", "step6-tmp-0123456789ab",
                           "step7-tmp-0123456789ab", "steps", "step2-tmp-x"));
}

// Who has a file open reads it to the end; who has not gets one error, and no other values.
TEST(Retain, AReaderOfWhatGoesReadsAllOrFails_C05) {
  for (const Location& run : {Location(temporary_directory()), Location(memory_store())}) {
    save_steps(run, {1, 2});
    const auto open = [&] { return Checkpoint::open(run_checkpoint(run, 1).where); };
    const Checkpoint reading = open();
    const Checkpoint waiting = open();
    const auto wanted = floats(reading.load().at("weight").as_tensor());
    (void)retain(run, run_checkpoint(run, 2), {.sharded = 1});
    EXPECT_EQ(floats(reading.load().at("weight").as_tensor()), wanted);
    const Error error = error_of([&] { (void)waiting.load(); });
    EXPECT_EQ(error.code(), ErrorCode::not_found) << error.what();
    EXPECT_EQ(code_of([&] { (void)open(); }), ErrorCode::not_found);
  }
}

TEST(Retain, LaterStepsStayWithAWarning_C11) {
  const std::string run = temporary_directory();
  save_steps(run, {1, 2, 8, 9});
  const RetentionReport report = retain(run, run_checkpoint(run, 2), {.sharded = 1});
  EXPECT_THAT(names_in(run), ElementsAre("step9", "step8", "step2"));
  ASSERT_EQ(report.warnings.size(), 2U);
  EXPECT_THAT(report.warnings[0], HasSubstr("step9"));
}

TEST(Retain, WhatCannotBeJudgedStays) {
  class Deaf final : public testing_support::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
      if (name == "step2/.metadata") throw Error(ErrorCode::io, "no answer");
      return ForwardingStore::open(name);
    }
  };
  const auto saved = memory_store();
  save_steps(saved, {1, 2, 3});
  const auto store = std::make_shared<Deaf>(saved);
  const RetentionReport report = retain(store, run_checkpoint(store, 3), {.sharded = 2});
  EXPECT_THAT(report.removed, IsEmpty());
  ASSERT_EQ(report.warnings.size(), 1U);
  EXPECT_THAT(report.warnings[0], HasSubstr("step2 stays"));
}

TEST(Retain, LinksLeadToTheNewOne_O10) {
  const std::string run = temporary_directory();
  save_steps(run, {1, 2});
  save_step(run + "/step1-unsharded", 1);
  (void)retain(run, run_checkpoint(run, 1), {.link = true});
  EXPECT_EQ(fs::read_symlink(run + "/latest"), "step1");
  (void)retain(run, run_checkpoint(run, 2), {.link = true});
  (void)retain(run, run_checkpoint(run, 1, true), {.link = true});
  EXPECT_EQ(fs::read_symlink(run + "/latest"), "step2");
  EXPECT_EQ(fs::read_symlink(run + "/latest-unsharded"), "step1-unsharded");
  EXPECT_EQ(Checkpoint::open(run + "/latest").leaves.size(), 2U);
  EXPECT_THAT(names_below(run), UnorderedElementsAre("step1", "step2", "step1-unsharded", "latest",
                                                     "latest-unsharded"));
  // Something else with that name is not replaced.
  fs::remove(run + "/latest");
  fs::create_directories(run + "/latest/x");
  EXPECT_EQ(code_of([&] { (void)retain(run, run_checkpoint(run, 2), {.link = true}); }),
            ErrorCode::io);
  EXPECT_EQ(names_below(run).size(), 5U);
}

TEST(Retain, RankZeroRemovesAndAllHear) {
  const auto store = memory_store();
  save_steps(store, {1, 2, 3});
  run_ranks(3, [&](Group& group) {
    const RetentionReport report = retain(store, run_checkpoint(store, 2), {.sharded = 1}, group);
    EXPECT_THAT(report.removed, ElementsAre("step1"));
    EXPECT_EQ(report.warnings.size(), 1U);
  });
  EXPECT_THAT(names_in(store), ElementsAre("step3", "step2"));
  run_ranks(3, [&](Group& group) {
    EXPECT_EQ(code_of([&] { (void)retain(store, run_checkpoint(store, 7), {}, group); }),
              ErrorCode::incomplete);
  });
}

}  // namespace
}  // namespace tessera
