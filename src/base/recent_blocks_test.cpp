#include "base/recent_blocks.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <latch>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <vector>

#include "base/parallel.h"

namespace tessera {
namespace {

using Key = RecentBlocks::Key;

RecentBlocks::Bytes block_of(RecentBlocks& blocks, std::uint64_t number) {
  auto bytes = blocks.room(8);
  (*bytes)[0] = static_cast<std::byte>(number);
  return bytes;
}

TEST(RecentBlocks, OneThreadReadsWhatSeveralWant) {
  RecentBlocks blocks(4);
  std::atomic<int> reads{0};
  parallel_for(8, 400, [&](std::size_t i) {
    const std::uint64_t number = i / 100;
    const auto bytes = blocks.get({1, number}, [&] {
      ++reads;
      std::this_thread::yield();
      return block_of(blocks, number);
    });
    EXPECT_EQ((*bytes)[0], static_cast<std::byte>(number));
  });
  EXPECT_EQ(reads, 4);
}

TEST(RecentBlocks, MemoryOfSeveralBlocksIsUsedAgain) {
  RecentBlocks blocks(2);
  std::set<const std::byte*> first;
  {
    const auto one = blocks.room(1 << 20), other = blocks.room(1 << 20), third = blocks.room(8);
    first = {one->data(), other->data(), third->data()};
  }
  const auto one = blocks.room(8), other = blocks.room(8), third = blocks.room(8);
  EXPECT_EQ(first.count(one->data()) + first.count(other->data()), 2U);
  EXPECT_NE(third->data(), one->data());
}

TEST(RecentBlocks, TheLastOnesStay) {
  RecentBlocks blocks(2);
  for (std::uint64_t number = 0; number < 3; ++number)
    (void)blocks.get({1, number}, [&] { return block_of(blocks, number); });
  EXPECT_EQ(blocks.wait_for({1, 0}), nullptr);
  EXPECT_NE(blocks.wait_for({1, 1}), nullptr);
  EXPECT_EQ(blocks.find({2, 1}).bytes, nullptr);
  // What somebody has of one that is gone keeps its memory.
  const auto held = blocks.wait_for({1, 1});
  for (std::uint64_t number = 3; number < 9; ++number)
    (void)blocks.get({1, number}, [&] { return block_of(blocks, number); });
  EXPECT_EQ((*held)[0], std::byte{1});
}

TEST(RecentBlocks, OneOfWhichBothEndsWereTakenGoes) {
  RecentBlocks blocks(4);
  for (const std::uint64_t number : {0, 1})
    (void)blocks.get({1, number}, [&] { return block_of(blocks, number); });
  blocks.took({1, 0}, false, true);
  blocks.took({1, 0}, false, false);
  blocks.took({1, 1}, true, false);
  EXPECT_NE(blocks.wait_for({1, 0}), nullptr);
  blocks.took({1, 0}, true, false);
  EXPECT_EQ(blocks.wait_for({1, 0}), nullptr);
  EXPECT_NE(blocks.wait_for({1, 1}), nullptr);
}

TEST(RecentBlocks, WhoWaitsForAReaderThatFailsReads) {
  RecentBlocks blocks(4);
  std::optional<RecentBlocks::Claim> claim;
  (void)blocks.find({1, 0}, claim);
  ASSERT_TRUE(claim);
  EXPECT_TRUE(blocks.find({1, 0}).is_coming);
  std::atomic<int> reads{0};
  std::jthread waiting([&] {
    (void)blocks.get({1, 0}, [&] {
      ++reads;
      return block_of(blocks, 0);
    });
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(reads, 0);
  claim.reset();
  waiting.join();
  EXPECT_EQ(reads, 1);
  const auto failing = []() -> RecentBlocks::Bytes { throw std::runtime_error("no bytes"); };
  EXPECT_THROW((void)blocks.get({1, 5}, failing), std::runtime_error);
  EXPECT_FALSE(blocks.find({1, 5}).is_coming);
}

TEST(RecentBlocks, AChildDoesNotWaitForItsParentsThreads) {
  RecentBlocks blocks(4);
  std::optional<RecentBlocks::Claim> claim;
  (void)blocks.find({1, 0}, claim);
  (void)blocks.get({1, 1}, [&] { return block_of(blocks, 1); });
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(10);
    const bool is_there = blocks.wait_for({1, 1}) != nullptr;
    const bool is_read = blocks.get({1, 0}, [&] { return block_of(blocks, 0); }) != nullptr;
    ::_exit(is_there && is_read ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

TEST(SharedBlocks, AreThoseOfTheInnermostJobAndOfItsThreads) {
  EXPECT_EQ(SharedBlocks::here(), nullptr);
  const SharedBlocks outer(2);
  RecentBlocks* const outer_blocks = SharedBlocks::here();
  {
    const SharedBlocks inner(2);
    RecentBlocks* const inner_blocks = SharedBlocks::here();
    EXPECT_NE(inner_blocks, outer_blocks);
    parallel_for(3, 10, [&](std::size_t) { EXPECT_EQ(SharedBlocks::here(), inner_blocks); });
  }
  EXPECT_EQ(SharedBlocks::here(), outer_blocks);
}

// A store that hangs until its retries end is waited for once.
TEST(RecentBlocks, WhoWaitsFailsWithTheReader) {
  RecentBlocks blocks(4);
  std::atomic<int> reads = 0, failures = 0;
  const auto fail_slowly = [&]() -> RecentBlocks::Bytes {
    ++reads;
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    throw Error(ErrorCode::io, "lost");
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i) {
    threads.emplace_back([&] {
      try {
        (void)blocks.get({1, 1}, fail_slowly);
      } catch (const Error&) {
        ++failures;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 6);
  EXPECT_LE(reads, 2);  // of a thread that came late
  EXPECT_NE(blocks.get({1, 1}, [] { return std::make_shared<std::vector<std::byte>>(1); }),
            nullptr);
}

// Whoever catches an Error adds to it: two threads that had one corrupted the heap.
TEST(RecentBlocks, EachThreadHasAnErrorOfItsOwn) {
  constexpr int kThreads = 4;
  RecentBlocks blocks(4);
  std::set<const Error*> errors;  // guarded by mutex
  std::mutex mutex;
  std::latch all_have_one(kThreads);
  const auto fail_slowly = []() -> RecentBlocks::Bytes {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    throw Error(ErrorCode::corrupt, "damaged");
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      try {
        (void)blocks.get({1, 1}, fail_slowly);
      } catch (const Error& error) {
        {
          const std::lock_guard lock(mutex);
          errors.insert(&error);
        }
        all_have_one.arrive_and_wait();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(errors.size(), static_cast<std::size_t>(kThreads));
}

TEST(RecentBlocks, AStopEndsTheWaitAndNoOtherJob) {
  RecentBlocks blocks(4);
  std::optional<RecentBlocks::Claim> claim;
  (void)blocks.find({1, 1}, claim);
  std::stop_source stop;
  stop.request_stop();
  std::thread([&] {
    const HeedStop heeding(stop.get_token());
    EXPECT_THROW((void)blocks.wait_for({1, 1}), Error);
  }).join();
  std::thread other([&] { EXPECT_EQ(blocks.wait_for({1, 1}), nullptr); });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  claim->fail(std::make_exception_ptr(Error(ErrorCode::cancelled, "the reader's own")));
  other.join();
}

}  // namespace
}  // namespace tessera
