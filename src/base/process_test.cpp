#include "base/process.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

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

constexpr const char* kName = "TESSERA_OF_A_TEST";

void set(const std::string& name, const std::string& value) {
  ASSERT_EQ(::setenv(name.c_str(), value.c_str(), 1), 0);
}

TEST(Environment, TheLatestCopyIsWhatCounts) {
  set(kName, "first=1");
  copy_environment();
  EXPECT_EQ(environment_variable(kName), "first=1");
  set(kName, "second");
  EXPECT_EQ(environment_variable(kName), "first=1");
  copy_environment();
  EXPECT_EQ(environment_variable(kName), "second");
  ::unsetenv(kName);
  copy_environment();
  EXPECT_EQ(environment_variable(kName), std::nullopt);
}

TEST(Environment, ANameIsAllThatStandsBeforeTheSign) {
  const Variables all{"PATHS=a", "PATH", "PATH=", "PATH=second"};
  EXPECT_EQ(variable_of(all, "PATH"), "");
  EXPECT_EQ(variable_of(all, "PAT"), std::nullopt);
  EXPECT_EQ(variable_of({}, "PATH"), std::nullopt);
}

// The array of the environment moves each time.
void set_many() {
  for (int i = 0; i < 3000; ++i) set(kName + std::to_string(i), "some value");
  for (int i = 0; i < 3000; ++i) ::unsetenv((kName + std::to_string(i)).c_str());
}

TEST(Environment, ThreadsReadWhileItChanges) {
  set(kName, "kept");
  copy_environment();
  std::atomic<bool> is_over = false;
  std::atomic<int> wrong = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!is_over) wrong += environment_variable(kName) != "kept" ? 1 : 0;
    });
  }
  set_many();
  copy_environment();
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Environment, AChildThatIsForkedMeanwhileReadsIt) {
  set(kName, "kept");
  copy_environment();
  std::atomic<bool> is_over = false;
  std::thread reader([&] {
    while (!is_over) (void)environment_variable(kName);
  });
  int wrong = 0;
  for (int i = 0; i < 200; ++i) {
    const pid_t child = ::fork();
    if (child == 0) {
      ::alarm(20);  // it ends where it waits for a thread that it does not have
      ::_exit(environment_variable(kName) == "kept" ? 0 : 1);
    }
    int status = 0;
    wrong += ::waitpid(child, &status, 0) != child || status != 0 ? 1 : 0;
  }
  is_over = true;
  reader.join();
  EXPECT_EQ(wrong, 0);
}

TEST(RandomId, HasTheStatedForm) {
  EXPECT_THAT(random_attempt(), testing::MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(random_attempt().size(), 12U);
  const std::string uuid = random_uuid();
  ASSERT_EQ(uuid.size(), 36U);
  EXPECT_THAT(uuid,
              testing::MatchesRegex("[0-9a-f]+-[0-9a-f]+-4[0-9a-f]+-[89ab][0-9a-f]+-[0-9a-f]+"));
  EXPECT_EQ(uuid[8], '-');
  EXPECT_EQ(uuid[23], '-');
}

TEST(RandomId, DoesNotRepeat) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random_attempt());
  for (int i = 0; i < 1000; ++i) seen.insert(random_uuid());
  EXPECT_EQ(seen.size(), 2000U);
}

bool is_open(int fd) {
  return ::fcntl(fd, F_GETFD) >= 0;
}

Fd open_null() {
  return Fd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

TEST(Fd, ClosesWhatItOwns) {
  int number = -1;
  {
    const Fd fd = open_null();
    number = fd.get();
    ASSERT_TRUE(fd);
    EXPECT_TRUE(is_open(number));
  }
  EXPECT_FALSE(is_open(number));
  EXPECT_FALSE(Fd());
}

TEST(Fd, AMoveHandsOverTheDescriptor) {
  Fd first = open_null();
  const int number = first.get();
  Fd second = std::move(first);
  EXPECT_EQ(second.get(), number);
  const int replaced = number;
  second = open_null();
  EXPECT_FALSE(is_open(replaced));
  EXPECT_TRUE(is_open(second.get()));
}

}  // namespace
}  // namespace tessera
