#include "base/parallel.h"

#include <pthread.h>

#include <atomic>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/log.h"

namespace tessera {
namespace {

TEST(Parallel, EveryIndexOnce) {
  for (const int threads : {-1, 0, 1, 3, 16}) {
    std::vector<std::atomic<int>> calls(100);
    parallel_for(threads, calls.size(), [&](std::size_t i) { ++calls[i]; });
    for (const auto& count : calls) EXPECT_EQ(count, 1);
  }
  parallel_for(4, 0, [](std::size_t) { FAIL(); });
}

// No room for the stack of a thread is what a system without more threads looks like.
TEST(Parallel, WithoutThreadsTheCallerDoesTheWork) {
  pthread_attr_t usual, huge;
  ASSERT_EQ(::pthread_getattr_default_np(&usual), 0);
  ASSERT_EQ(::pthread_getattr_default_np(&huge), 0);
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, std::size_t{1} << 60), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  EXPECT_THROW(std::thread([] {}), std::system_error);
  std::vector<int> calls(100);
  EXPECT_NO_THROW(parallel_for(8, calls.size(), [&](std::size_t i) { ++calls[i]; }));
  EXPECT_EQ(::pthread_setattr_default_np(&usual), 0);
  EXPECT_EQ(calls, std::vector<int>(100, 1));
}

TEST(Parallel, TheLowestFailureIsRethrownAfterAllHaveEnded) {
  std::atomic<int> running{0};
  std::atomic<int> met{0};
  const auto work = [&](std::size_t i) {
    ++running;
    // All four are under way before the first fails.
    ++met;
    while (met < 4) std::this_thread::yield();
    --running;
    if (i != 2) throw std::runtime_error(std::to_string(i));
  };
  try {
    parallel_for(4, 4, work);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "0");
  }
  EXPECT_EQ(running, 0);
}

TEST(Parallel, NothingIsHandedOutAfterAFailure) {
  int calls = 0;
  EXPECT_THROW(parallel_for(1, 1000,
                            [&](std::size_t i) {
                              ++calls;
                              if (i == 3) throw std::runtime_error("stop");
                            }),
               std::runtime_error);
  EXPECT_EQ(calls, 4);
}

// What a job counts and heeds holds for whoever works for it.
TEST(ParallelFor, ThreadsBelongToTheJobOfTheCaller) {
  std::stop_source source;
  const HeedStop heeding(source.get_token());
  source.request_stop();
  const TrafficCount count;
  for (const bool settles : {true, false}) {
    std::optional<Settling> settling;
    if (settles) settling.emplace();
    std::atomic<int> same{0};
    parallel_for(4, 100, [&](std::size_t) {
      TrafficCount::add({.requests = 1});
      if (HeedStop::is_requested() && Settling::is_under_way() == settles) ++same;
    });
    EXPECT_EQ(same, 100);
  }
  EXPECT_EQ(count.total().requests, 200U);
  bool is_heeded = true;
  std::jthread([&] { is_heeded = HeedStop::is_requested(); }).join();
  EXPECT_FALSE(is_heeded);
}

}  // namespace
}  // namespace tessera
