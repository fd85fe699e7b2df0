// A run that is told to end (fault-rows F27).
#include "tessera/grace.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "base/testing.h"
#include "checkpoint/background/testing.h"
#include "comm/testing.h"

namespace tessera {
namespace {

using namespace testing_support;  // NOLINT(google-build-using-namespace)
using namespace std::chrono_literals;
using ::testing::Contains;
using ::testing::HasSubstr;

TEST(Grace, ASignalEndsTheRunBehindAStep) {
  Grace grace;
  EXPECT_FALSE(grace.ends());
  std::raise(SIGTERM);
  std::raise(SIGTERM);  // a launcher may send it twice
  EXPECT_TRUE(grace.ends());
  EXPECT_TRUE(grace.ends());
  EXPECT_TRUE(grace.leaves_time_to_save());
  EXPECT_FALSE(grace.stop().stop_requested());
}

TEST(Grace, AllRanksEndBehindTheSameStep) {
  std::vector<int> ends(3);
  run_ranks(3, [&](Group& group) {
    Grace grace(group, {.time = 10s, .signals = {}});
    for (int step = 1;; ++step) {
      if (group.rank() == 2 && step == 7) std::thread([&] { grace.ask(); }).join();
      if (!grace.ends()) continue;
      ends.at(static_cast<std::size_t>(group.rank())) = step;
      EXPECT_TRUE(grace.leaves_time_to_save());
      break;
    }
  });
  EXPECT_THAT(ends, ::testing::Each(7));
}

// The dearest rank and the one with the least time count, and the log says so.
TEST(Grace, NoSaveBeginsThatDoesNotEndInTime) {
  for (const bool is_long : {false, true}) {
    const Warnings logged;
    run_ranks(2, [&](Group& group) {
      Grace grace(group, {.time = group.rank() == 0 ? 40s : 60s, .signals = {}});
      if (group.rank() == 1) grace.note_save(is_long ? 50s : 20s);
      grace.ask();
      ASSERT_TRUE(grace.ends());
      EXPECT_EQ(grace.leaves_time_to_save(), !is_long);
    });
    EXPECT_THAT(logged.texts(), Contains(HasSubstr(is_long ? "the newest checkpoint stands"
                                                           : "there is time for one more")));
  }
}

TEST(Grace, TheLongestOfTheLastFourSavesCounts) {
  const auto leaves = [](const std::vector<std::chrono::seconds>& saves) {
    Grace grace({.time = 30s, .signals = {}});
    for (const auto took : saves) grace.note_save(took);
    grace.ask();
    EXPECT_TRUE(grace.ends());
    return grace.leaves_time_to_save();
  };
  EXPECT_TRUE(leaves({}));
  EXPECT_TRUE(leaves({100s, 1s, 2s, 3s, 4s}));
  EXPECT_FALSE(leaves({1s, 100s, 2s, 3s, 4s}));
}

// A save waits for the one that is under way.
TEST(Grace, WhatIsLeftOfASaveInTheBackgroundCounts) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  const auto save = [&] { return writer.save(Value::dict({{"w", numbers(1, 1)}}), slow.where()); };
  for (const bool is_under_way : {false, true}) {
    Grace grace({.time = 30s, .signals = {}});
    grace.note_save(20s);
    if (is_under_way) grace.began(save());
    grace.ask();
    EXPECT_TRUE(grace.ends());
    EXPECT_EQ(grace.leaves_time_to_save(), !is_under_way);
  }
  slow.gate().open();
}

TEST(Grace, SavesInTheBackgroundAreMeasured) {
  CheckpointWriter writer(prompt());
  Grace grace({.time = 10s, .signals = {}});
  const auto store = memory_store();
  const PendingSave pending = writer.save(Value::dict({{"w", numbers(1, 1)}}), store);
  grace.began(pending);
  pending.result();
  const Warnings logged;
  EXPECT_FALSE(grace.ends());
  grace.ask();
  EXPECT_TRUE(grace.ends());
  EXPECT_THAT(logged.texts(), Contains(HasSubstr("a save takes")));
}

// Also where the next one begins before anybody has asked.
TEST(Grace, EachSaveInTheBackgroundIsMeasured) {
  const GatedPlace slow;
  CheckpointWriter writer(prompt());
  Grace grace({.time = 200ms, .signals = {}});
  const PendingSave first = writer.save(Value::dict({{"w", numbers(1, 1)}}), slow.where());
  grace.began(first);
  std::this_thread::sleep_for(250ms);
  slow.gate().open();
  first.result();
  grace.began(writer.save(Value::dict({{"w", numbers(1, 1)}}), memory_store()));
  writer.wait();
  grace.ask();
  EXPECT_TRUE(grace.ends());
  EXPECT_FALSE(grace.leaves_time_to_save());
}

// However long the time is.
TEST(Grace, TimesMayBeLong) {
  Grace grace({.time = std::chrono::milliseconds::max(), .signals = {}});
  grace.ask();
  EXPECT_TRUE(grace.ends());
  EXPECT_TRUE(grace.leaves_time_to_save());
  EXPECT_FALSE(grace.stop().stop_requested());
}

// Before the time is over, whatever the last saves took.
TEST(Grace, ASaveThatTakesTooLongIsStopped) {
  Grace grace({.time = 100ms, .signals = {}});
  grace.ask();
  EXPECT_TRUE(grace.ends());
  const auto begin = std::chrono::steady_clock::now();
  while (!grace.stop().stop_requested()) std::this_thread::sleep_for(1ms);
  EXPECT_GE(std::chrono::steady_clock::now() - begin, 50ms);
  SaveOptions options;
  options.stop = grace.stop();
  const auto store = memory_store();
  EXPECT_EQ(code_of([&] {
              save(Value::dict({{"w", numbers(1, 1)}}), store, options);
            }),
            ErrorCode::cancelled);
  EXPECT_TRUE(store->list("").empty());
}

std::atomic<int> heard = 0;

TEST(Grace, ThatEndsGivesTheSignalBack) {
  heard = 0;
  const auto before = std::signal(SIGUSR1, [](int /*signal*/) { ++heard; });
  {
    Grace outer({.signals = {SIGUSR1}});
    {
      Grace inner({.signals = {SIGUSR1}});
      std::raise(SIGUSR1);
      EXPECT_TRUE(inner.ends());
    }
    EXPECT_EQ(heard, 1);  // who had it hears it, too
    std::raise(SIGUSR1);
    EXPECT_EQ(heard, 2);
    EXPECT_TRUE(outer.ends());
  }
  std::raise(SIGUSR1);
  EXPECT_EQ(heard, 3);
  EXPECT_FALSE(Grace({.signals = {SIGUSR1}}).ends());  // what came before is not meant
  std::signal(SIGUSR1, before);
}

// A program may handle it otherwise meanwhile, and hand it on.
struct sigaction chained = {};
void hand_on(int signal, siginfo_t* info, void* context) {
  ++heard;
  if ((chained.sa_flags & SA_SIGINFO) != 0) chained.sa_sigaction(signal, info, context);
}

TEST(Grace, OtherHandlersAreLeftAlone) {
  heard = 0;
  struct sigaction before = {};
  ::sigaction(SIGUSR1, nullptr, &before);
  {
    Grace outer({.signals = {SIGUSR1}});
    struct sigaction mine = {};
    mine.sa_sigaction = &hand_on;
    mine.sa_flags = SA_SIGINFO;
    ::sigaction(SIGUSR1, &mine, &chained);
    std::raise(SIGUSR1);
    EXPECT_EQ(heard, 1);
    Grace inner({.signals = {SIGUSR1}});  // it has the signal again
    std::raise(SIGUSR1);
    EXPECT_EQ(heard, 2);
    EXPECT_TRUE(inner.ends());
    ::sigaction(SIGUSR1, &mine, nullptr);
  }
  chained = {};
  std::raise(SIGUSR1);
  EXPECT_EQ(heard, 3);
  ::sigaction(SIGUSR1, &before, nullptr);
}

TEST(Grace, AChildOfForkEndsByTheSignal) {
  Grace grace;
  const pid_t child = run_process([] {
    std::raise(SIGTERM);
    return 3;
  });
  EXPECT_EQ(end_of(child), -SIGTERM);
  const pid_t own = run_process([&] {
    Grace mine;
    std::raise(SIGTERM);
    return mine.ends() ? 4 : 5;
  });
  EXPECT_EQ(end_of(own), 4);
  EXPECT_FALSE(grace.ends());
}

TEST(Grace, RefusesWhatNobodyMeans) {
  for (const GraceOptions& options :
       {GraceOptions{.time = 0s}, GraceOptions{.signals = {SIGKILL}}, GraceOptions{.signals = {0}},
        GraceOptions{.signals = {1000}}})
    EXPECT_EQ(code_of([&] { const Grace refused(options); }), ErrorCode::invalid_argument);
}

}  // namespace
}  // namespace tessera
