// What a run keeps of its checkpoints: fault-rows C06, C11, C12, C13.
#include <gmock/gmock.h>

#include "checkpoint/run/testing.h"
#include "storage/posix/lock.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;
namespace fs = std::filesystem;

std::vector<std::string> names_in(const Location& run) {
  std::vector<std::string> names;
  for (const RunCheckpoint& one : run_checkpoints(run))
    names.push_back(run_checkpoint_name(one.step, one.unsharded));
  return names;
}

std::set<std::string> entries_of(const std::string& directory) {
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
  EXPECT_EQ(entries_of(run).size(), 4U);
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
      entries_of(run),
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
  class Deaf final : public testing::ForwardingStore {
   public:
    using ForwardingStore::ForwardingStore;
    [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
      if (name == "step2/.metadata") throw Error(ErrorCode::io, "no answer");
      return ForwardingStore::open(name);
    }
  };
  const auto store = std::make_shared<Deaf>(memory_store());
  save_steps(store, {1, 2, 3});
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
  EXPECT_THAT(entries_of(run), UnorderedElementsAre("step1", "step2", "step1-unsharded", "latest",
                                                    "latest-unsharded"));
  // Something else with that name is not replaced.
  fs::remove(run + "/latest");
  fs::create_directories(run + "/latest/x");
  EXPECT_EQ(code_of([&] { (void)retain(run, run_checkpoint(run, 2), {.link = true}); }),
            ErrorCode::io);
  EXPECT_EQ(entries_of(run).size(), 5U);
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
