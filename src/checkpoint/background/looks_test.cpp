// Who looks at a place where a save is under way.
#include <gmock/gmock.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <mutex>
#include <string>
#include <thread>

#include "checkpoint/background/testing.h"
#include "tessera/copy.h"
#include "tessera/library.h"
#include "tessera/run_directory.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::HasSubstr;

Value number(float value) {
  return Value::dict({{"w", numbers(1, value)}});
}

// A run with one checkpoint, and a save of the next one that takes a while.
class UnderWayTest : public testing::Test {
 protected:
  UnderWayTest() { save(number(1), run_checkpoint(run_, 1).where); }

  // What `look` finds while the save of step 2 is under way.
  template <typename Look>
  auto seen_by(const Look& look) {
    writer_.save(number(2), run_checkpoint(run_, 2).where, replacing());
    return look();
  }

  const std::string run_ = temporary_directory() + "/run";
  CheckpointWriter writer_{prompt({.rate = 40})};  // 4 bytes: a tenth of a second
};

TEST_F(UnderWayTest, ALoadWaitsForIt) {
  Value tree = number(0);
  seen_by([&] { return load(tree, run_ + "/step2/"); });
  EXPECT_EQ(floats(tree.at("w").as_tensor()).at(0), 2);
}

TEST_F(UnderWayTest, TheLatestIsTheNewOne) {
  EXPECT_EQ(seen_by([&] { return latest_checkpoint(run_); }).found->step, 2);
  EXPECT_EQ(run_checkpoints(run_).size(), 2U);
}

TEST_F(UnderWayTest, TheLatestOfRanksIsTheNewOne) {
  const auto step_of_ranks = [&] {
    std::atomic<std::int64_t> step = 0;
    run_ranks(2, [&](Group& group) { step = latest_checkpoint(run_, {}, group).found->step; });
    return step.load();
  };
  EXPECT_EQ(seen_by(step_of_ranks), 2);
}

TEST_F(UnderWayTest, RetentionAndCopiesWaitForIt) {
  const RunCheckpoint second = run_checkpoint(run_, 2);
  const auto report = seen_by([&] { return retain(run_, second, {.sharded = 1}); });
  EXPECT_EQ(report.removed.size(), 1U);
  const std::string copied = temporary_directory();
  writer_.save(number(3), second.where, replacing());
  copy(second.where, copied + "/copy");
  EXPECT_EQ(floats_at(copied + "/copy", "w").at(0), 3);
  writer_.save(number(4), second.where, replacing());
  upload(second.where, copied + "/upload");
  EXPECT_EQ(floats_at(copied + "/upload", "w").at(0), 4);
}

TEST_F(UnderWayTest, ItIsFoundByLinksAndOtherNames) {
  std::filesystem::create_directory_symlink(run_, run_ + "-link");
  const auto names = {run_ + "-link/step2", run_ + "/../run/./step2", "file://" + run_ + "/step2"};
  for (const std::string& name : names) {
    writer_.save(number(2), run_checkpoint(run_, 2).where, replacing());
    EXPECT_EQ(floats_at(name, "w").at(0), 2);
  }
}

TEST(UnderWay, OthersDoNotWait) {
  const GatedPlace stuck;
  CheckpointWriter writer(prompt());
  const PendingSave pending = writer.save(number(1), stuck.where());
  stuck.gate().await_somebody();
  const auto other = memory_store();  // of the same name
  save(number(3), other);
  EXPECT_EQ(floats_at(Location(other), "w").at(0), 3);
  EXPECT_FALSE(pending.done());
  stuck.gate().open();  // before the writer ends
}

TEST(UnderWay, AStopEndsTheWaitAndTheLogSaysWhomItIsFor) {
  const GatedPlace stuck;
  std::mutex mutex;
  std::string said;
  set_log([&](LogLevel level, std::string_view text) {
    const std::lock_guard lock(mutex);
    if (level == LogLevel::info) said += text;
  });
  CheckpointWriter writer(prompt());
  const PendingSave pending = writer.save(number(1), stuck.where());
  std::stop_source source;
  std::thread stopper([&] {
    std::this_thread::sleep_for(100ms);
    source.request_stop();
  });
  Value tree = number(0);
  LoadOptions options;
  options.stop = source.get_token();
  EXPECT_EQ(code_of([&] { load(tree, stuck.where(), options); }), ErrorCode::cancelled);
  stopper.join();
  set_log({});
  EXPECT_THAT(said, HasSubstr("waiting for the save that is under way at memory"));
  EXPECT_FALSE(pending.done());
  stuck.gate().open();
}

}  // namespace
}  // namespace tessera
