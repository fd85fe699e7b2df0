#include "base/log.h"

#include <stdlib.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/parallel.h"
#include "tessera/library.h"

namespace tessera {
namespace {

TEST(Log, AHookHearsEverything) {
  std::string heard;
  set_log([&heard](LogLevel level, std::string_view message) {
    heard += (level == LogLevel::info ? "info " : "warning ") + std::string(message) + ";";
  });
  log(LogLevel::info, "one");
  log_of_all(LogLevel::warning, "two");
  log_of_all(LogLevel::warning, "two");
  set_log({});
  log(LogLevel::info, "three");
  EXPECT_EQ(heard, "info one;warning two;warning two;");
}

TEST(Log, WithoutAHookWarningsAreWrittenOnce) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3; ++i) log(LogLevel::warning, "a warning of this test");
  log(LogLevel::info, "a note of this test");
  log(LogLevel::warning, "another warning of this test");
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "tessera: warning: a warning of this test\n"
            "tessera: warning: another warning of this test\n");
}

TEST(Log, NotesAreWrittenToWhoAsksForThem) {
  const auto written = [] {
    testing::internal::CaptureStderr();
    log(LogLevel::debug, "a detail");
    for (int i = 0; i < 2; ++i) log(LogLevel::info, "the rate");
    return testing::internal::GetCapturedStderr();
  };
  ::setenv("TESSERA_LOG", "info", 1);
  copy_environment();
  EXPECT_EQ(written(), "tessera: note: the rate\ntessera: note: the rate\n");
  ::unsetenv("TESSERA_LOG");
  copy_environment();
  EXPECT_EQ(written(), "");
}

TEST(Log, WhatAllRanksSayRankZeroWrites) {
  const auto written = [](const char* rank, const std::string& text) {
    ::setenv("RANK", rank, 1);
    copy_environment();
    testing::internal::CaptureStderr();
    log_of_all(LogLevel::warning, text + " of all");
    log(LogLevel::warning, text + " of its own");
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(written("0", "first"),
            "tessera: warning: first of all\ntessera: warning: first of its own\n");
  EXPECT_EQ(written("3", "second"), "tessera: warning: second of its own\n");
  ::unsetenv("RANK");
  copy_environment();
}

struct Heard {
  std::string phase;
  std::uint64_t bytes, id;
  std::string error;
};

EventHook into(std::vector<Heard>& heard) {
  return [&heard](const Event& event) {
    EXPECT_EQ(event.job, "test");
    EXPECT_EQ(event.rank, 3);
    EXPECT_EQ(event.checkpoint, "place");
    heard.push_back({std::string(event.phase), event.bytes, event.id,
                     event.error == nullptr ? "" : event.error->what()});
  };
}

TEST(JobLog, TellsOfPhasesFromTheInsideOut) {
  std::vector<Heard> heard;
  const JobLog log(into(heard), "test", 3, "place");
  EXPECT_EQ(log.phase("all", [&] { return log.phase("part", [] { return 5; }) + 2; }), 7U);
  ASSERT_EQ(heard.size(), 2U);
  EXPECT_EQ(heard[0].phase, "part");
  EXPECT_EQ(heard[0].bytes, 5U);
  EXPECT_EQ(heard[1].phase, "all");
  EXPECT_EQ(heard[1].bytes, 7U);
  EXPECT_EQ(heard[0].id, heard[1].id);
  const JobLog next(into(heard), "test", 3, "place");
  next.phase("all", [] { return 0; });
  EXPECT_NE(heard[2].id, heard[0].id);
}

TEST(JobLog, TellsOfFailuresAndThrowsThem) {
  std::vector<Heard> heard;
  const JobLog log(into(heard), "test", 3, "place");
  const auto fail = []() -> std::uint64_t { throw Error(ErrorCode::corrupt, "bad"); };
  EXPECT_THROW(log.phase("all", [&] { return log.phase("part", fail); }), Error);
  const auto fail_plainly = []() -> std::uint64_t { throw std::out_of_range("plain"); };
  EXPECT_THROW(log.phase("other", fail_plainly), std::out_of_range);
  ASSERT_EQ(heard.size(), 3U);
  EXPECT_EQ(heard[0].error, "corrupt: bad");
  EXPECT_EQ(heard[1].error, "corrupt: bad");
  EXPECT_EQ(heard[2].error, "io: plain");
}

TEST(JobLog, AHookThatThrowsChangesNothing) {
  const JobLog log([](const Event&) { throw std::runtime_error("deaf"); }, "test", 0, "");
  EXPECT_EQ(log.phase("all", [] { return 4; }), 4U);
  EXPECT_THROW(log.phase("all", []() -> std::uint64_t { throw Error(ErrorCode::corrupt, "bad"); }),
               Error);
  EXPECT_EQ(JobLog({}, "test", 0, "").phase("all", [] { return 6; }), 6U);
}

// What a job of so many requests counts, by threads of its own.
std::uint64_t counted(std::size_t requests) {
  const TrafficCount count;
  parallel_for(4, requests, [](std::size_t) { TrafficCount::add({.requests = 1}); });
  return count.total().requests;
}

TEST(Traffic, JobsAtOnceAreCountedApart) {
  std::uint64_t first = 0;
  std::uint64_t second = 0;
  {
    const std::jthread a([&] { first = counted(5'000); });
    const std::jthread b([&] { second = counted(7'000); });
  }
  EXPECT_EQ(first, 5'000U);
  EXPECT_EQ(second, 7'000U);
}

TEST(Traffic, AnOuterCountHasWhatInnerOnesHave) {
  const TrafficCount outer;
  TrafficCount::add({.requests = 1, .retries = 1});
  EXPECT_EQ(counted(10), 10U);
  TrafficCount::add({.bytes_again = 5});
  EXPECT_EQ(outer.total().requests, 11U);
  EXPECT_EQ(outer.total().retries, 1U);
  EXPECT_EQ(outer.total().bytes_again, 5U);
  std::jthread([] { TrafficCount::add({.requests = 1}); }).join();  // it works for nobody
  EXPECT_EQ(outer.total().requests, 11U);
}

}  // namespace
}  // namespace tessera
