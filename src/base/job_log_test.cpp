#include "base/job_log.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <vector>

namespace tessera {
namespace {

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

}  // namespace
}  // namespace tessera
