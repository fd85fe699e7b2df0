#include "base/traffic.h"

#include <gtest/gtest.h>

#include <thread>

#include "base/parallel.h"

namespace tessera {
namespace {

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
