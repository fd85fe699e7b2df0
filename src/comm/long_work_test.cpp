#include "comm/long_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/stop.h"

namespace tessera {
namespace {

// Goes on until it is asked to stop, and throws then.
void until_stopped(const std::stop_token& stop) {
  while (!stop.stop_requested()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  require_going_on(stop);
}

// Runs `work` on every rank; the code that each of them got, if any.
std::map<int, ErrorCode> codes(int ranks, const std::function<void(int, std::stop_source&)>& begin,
                               const std::function<void(int, const std::stop_token&)>& work) {
  std::mutex mutex;
  std::map<int, ErrorCode> seen;
  run_ranks(ranks, [&](Group& group) {
    std::stop_source source;
    begin(group.rank(), source);
    try {
      agree_on_long_work(group, "working", source.get_token(),
                         [&](const std::stop_token& stop) { work(group.rank(), stop); });
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      seen.emplace(group.rank(), error.code());
    }
    group.barrier();  // the group still works
  });
  return seen;
}

const auto kNothing = [](int, std::stop_source&) {};

TEST(LongWork, ReturnsWhenAllAreDone) {
  EXPECT_TRUE(codes(3, kNothing, [](int, const std::stop_token&) {}).empty());
}

TEST(LongWork, AFailureEndsTheWorkOfAll) {
  const auto seen = codes(3, kNothing, [](int rank, const std::stop_token& stop) {
    if (rank == 1) throw Error(ErrorCode::out_of_space, "full");
    until_stopped(stop);  // would not return otherwise
  });
  EXPECT_EQ(seen.size(), 3U);
  for (const auto& [rank, code] : seen) EXPECT_EQ(code, ErrorCode::out_of_space) << rank;
}

TEST(LongWork, ARequestOnOneRankEndsTheWorkOfAll) {
  const auto request = [](int rank, std::stop_source& source) {
    if (rank == 2) source.request_stop();
  };
  const auto seen =
      codes(3, request, [](int, const std::stop_token& stop) { until_stopped(stop); });
  EXPECT_EQ(seen.size(), 3U);
  for (const auto& [rank, code] : seen) EXPECT_EQ(code, ErrorCode::cancelled) << rank;
}

// The deadline of a collective is not one of the work.
TEST(LongWork, RanksThatAreDoneWaitForSlowerOnes) {
  std::atomic<int> done = 0;
  run_ranks(
      2,
      [&](Group& group) {
        agree_on_long_work(group, "working", {}, [&](const std::stop_token&) {
          if (group.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(1500));
          ++done;
        });
        EXPECT_EQ(done, 2);
      },
      std::chrono::milliseconds(1000));
}

TEST(LongWork, WhenPeersAreGoneTheWorkEnds) {
  bool ended = false;
  EXPECT_THROW(run_ranks(2,
                         [&](Group& group) {
                           if (group.rank() == 1) return;
                           agree_on_long_work(group, "working", {},
                                              [&](const std::stop_token& stop) {
                                                while (!stop.stop_requested())
                                                  std::this_thread::yield();
                                                ended = true;
                                              });
                         }),
               Error);
  EXPECT_TRUE(ended);
}

TEST(LongWork, AloneTheTokenIsTheCallers) {
  const auto group = solo_group();
  std::stop_source source;
  source.request_stop();
  EXPECT_THROW(agree_on_long_work(*group, "working", source.get_token(),
                                  [](const std::stop_token& stop) { until_stopped(stop); }),
               Error);
}

}  // namespace
}  // namespace tessera
