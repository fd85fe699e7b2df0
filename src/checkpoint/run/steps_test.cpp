#include "checkpoint/run/steps.h"

#include <span>

#include <gmock/gmock.h>

#include "checkpoint/open/located.h"
#include "checkpoint/run/testing.h"

namespace tessera {

// A run that goes on from an earlier step: fault-rows C11.

namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::int64_t latest_step(const Location& run) {
  return latest_checkpoint(run).found->step;
}

void save_again(const Location& run, std::int64_t step) {
  Location where = run_checkpoint(run, step).where;
  if (where.store) {
    remove_markers_first(*where.store);
  } else {
    std::filesystem::remove_all(where.path);
  }
  save_step(where, 2);
}

TEST(LeftLine, LaterStepsAreNotTheLatestUntilTheyAreSavedAgain_C11) {
  for (const Location& run : empty_runs()) {
    for (const std::int64_t step : {1, 2, 3, 4}) save_step(run_checkpoint(run, step).where, 1);
    go_on_from(run, 2);
    const LatestCheckpoint latest = latest_checkpoint(run);
    EXPECT_EQ(latest.found->step, 2);
    ASSERT_EQ(latest.warnings.size(), 2U);
    EXPECT_THAT(latest.warnings[0], HasSubstr("step4 is passed over"));
    save_again(run, 3);
    EXPECT_EQ(latest_step(run), 3);
    // Retention knows why the fourth is later.
    EXPECT_THAT(retain(run, run_checkpoint(run, 3), {.sharded = 1}).warnings, IsEmpty());
    save_again(run, 4);
    EXPECT_EQ(latest_step(run), 4);
    (void)retain(run, run_checkpoint(run, 4));
    EXPECT_THAT(read_left(*directory_store(run)), IsEmpty());
  }
}

// The marker of OLMo's kinds is the same in each save: that the step was saved, retention notes.
TEST(LeftLine, RetentionNotesWhatIsSavedAgain_C11) {
  const auto store = memory_store();
  for (const char* step : {"step1/", "step2/"})
    copy_objects(posix_store(written(CheckpointKind::olmo_legacy)), *store, step);
  go_on_from(store, 1);
  EXPECT_EQ(latest_step(store), 1);
  (void)retain(store, run_checkpoint(store, 2));
  EXPECT_EQ(latest_step(store), 2);
}

TEST(LeftLine, NoneIsTakenWhenAllWereLeft_C11) {
  const auto store = memory_store();
  save_step(run_checkpoint(store, 7).where, 1);
  go_on_from(store, 3);  // a checkpoint of another run
  const Error error = error_of([&] { (void)latest_checkpoint(store); });
  EXPECT_EQ(error.code(), ErrorCode::conflict);
  EXPECT_THAT(error.message(), HasSubstr("step7"));
  go_on_from(store, 7);
  EXPECT_EQ(latest_step(store), 7);
  EXPECT_FALSE(store->exists("tessera-left.txt"));
}

TEST(LeftLine, ADamagedRecordIsCorrupt) {
  const auto store = memory_store();
  save_step(run_checkpoint(store, 1).where, 1);
  for (const std::string text : {"step1\n", "step1 12\n", " 0123456789abcdef\n", "\n"}) {
    put(*store, "tessera-left.txt", std::as_bytes(std::span(text)), IfExists::replace);
    const Error error = error_of([&] { (void)latest_checkpoint(store); });
    EXPECT_EQ(error.code(), ErrorCode::corrupt) << text;
    EXPECT_THAT(error.path(), HasSubstr("tessera-left.txt"));
  }
  go_on_from(store, 1);  // says it anew
  EXPECT_EQ(latest_step(store), 1);
}

TEST(LeftLine, RankZeroNotesForAll) {
  const auto store = memory_store();
  for (const std::int64_t step : {1, 2}) save_step(run_checkpoint(store, step).where, 1);
  run_ranks(3, [&](Group& group) {
    go_on_from(group.rank() == 0 ? store : memory_store(), 1, group);
    EXPECT_EQ(latest_checkpoint(store, {}, group).found->step, 1);
  });
}

}  // namespace
}  // namespace tessera
