#include "base/fork.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <memory>
#include <thread>
#include <vector>

namespace tessera {
namespace {

// What `work` returns in a child, as an exit status; one that hangs is killed after ten seconds.
template <typename Work>
int in_child(const Work& work) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    ::_exit(work());
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Fork, AChildHasAnotherNumberAndKnowsWhatItHasNotMade) {
  const MadeHere made;
  const std::uint64_t number = process_number();
  const auto child = [&] { return made || process_number() == number ? 1 : 0; };
  EXPECT_EQ(in_child(child), 0);
  EXPECT_EQ(in_child([&] { return in_child(child); }), 0);
  EXPECT_TRUE(made);
}

TEST(Fork, AChildMakesItsOwn) {
  PerProcess<int> one;
  const auto make = [](int value) { return [value] { return std::make_unique<int>(value); }; };
  EXPECT_EQ(one.get(make(1)), 1);
  EXPECT_EQ(one.get(make(2)), 1);
  EXPECT_EQ(in_child([&] { return one.get(make(3)); }), 3);
  EXPECT_EQ(one.get(make(4)), 1);
}

// Two numbers that are equal whenever nobody is between the two.
struct Pair {
  ShortMutex mutex;
  int first = 0, second = 0;

  void step() {
    const std::lock_guard lock(mutex);
    ++first;
    for (int i = 0; i < 100; ++i) (void)process_number();  // it takes a moment
    ++second;
  }
};

TEST(Fork, WhatAShortMutexGuardsIsFreeAndWholeInEveryChild) {
  Pair pair;
  std::vector<std::jthread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&](const std::stop_token& stop) {
      while (!stop.stop_requested()) pair.step();
    });
  }
  for (int i = 0; i < 100; ++i) {
    ASSERT_EQ(in_child([&] {
                const std::lock_guard lock(pair.mutex);
                return pair.first == pair.second ? 0 : 1;
              }),
              0);
  }
}

TEST(Fork, ASlowMutexThatAnotherThreadHasIsFreeInAChild) {
  SlowMutex mutex;
  std::unique_lock held(mutex);
  std::jthread other([&] {
    EXPECT_EQ(in_child([&] {
                const std::lock_guard lock(mutex);
                return in_child([&] {
                  const std::lock_guard again(mutex);
                  return 0;
                });
              }),
              0);
  });
  other.join();
}

// A hook that forks where nobody may does not wait for itself.
TEST(Fork, AThreadMayForkInAMomentOfItsOwn) {
  ShortMutex mutex;
  const std::lock_guard lock(mutex);
  const NoFork moment;
  EXPECT_EQ(in_child([&] {
              const NoFork inner;
              return 0;
            }),
            0);
}

}  // namespace
}  // namespace tessera
