#include "comm/thread_group.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

TEST(SoloGroup, IsRankZeroOfOne) {
  const auto group = solo_group();
  const Bytes message{std::byte{7}};
  EXPECT_EQ(group->rank(), 0);
  EXPECT_EQ(group->size(), 1);
  group->barrier();
  EXPECT_EQ(group->gather(message), std::vector<Bytes>{message});
  EXPECT_EQ(group->all_gather(message), std::vector<Bytes>{message});
  EXPECT_EQ(group->broadcast(message), message);
  EXPECT_EQ(group->scatter({message}), message);
}

TEST(SoloGroup, RefusesOtherRanks) {
  const auto group = solo_group();
  EXPECT_THROW((void)group->broadcast({}, 1), Error);
  EXPECT_THROW((void)group->scatter({{}, {}}), Error);
}

using namespace std::chrono_literals;

Bytes message(int value) {
  return Bytes(static_cast<std::size_t>(value + 1), std::byte(value));
}

// The error of a call that must fail.
TEST(ThreadGroup, CollectivesKeepRankOrder) {
  std::atomic<int> checked{0};
  run_ranks(5, [&](Group& group) {
    const int me = group.rank();
    ASSERT_EQ(group.size(), 5);
    for (int repeat = 0; repeat < 20; ++repeat) {
      const auto all = group.all_gather(message(me + repeat));
      ASSERT_EQ(all.size(), 5U);
      for (int r = 0; r < 5; ++r) EXPECT_EQ(all[static_cast<std::size_t>(r)], message(r + repeat));

      const int root = repeat % 5;
      const auto gathered = group.gather(message(me), root);
      ASSERT_EQ(gathered.size(), me == root ? 5U : 0U);
      for (std::size_t r = 0; r < gathered.size(); ++r) {
        EXPECT_EQ(gathered[r], message(static_cast<int>(r)));
      }

      EXPECT_EQ(group.broadcast(me == root ? message(repeat) : Bytes(), root), message(repeat));

      std::vector<Bytes> parts;
      if (me == root) {
        for (int r = 0; r < 5; ++r) parts.push_back(message(10 + r));
      }
      EXPECT_EQ(group.scatter(parts, root), message(10 + me));
      group.barrier();
    }
    ++checked;
  });
  EXPECT_EQ(checked, 5);
}

TEST(ThreadGroup, ABarrierWaitsForAll) {
  std::atomic<int> arrived{0};
  run_ranks(3, [&](Group& group) {
    std::this_thread::sleep_for(5ms * group.rank());
    ++arrived;
    group.barrier();
    EXPECT_EQ(arrived, 3);
  });
}

TEST(ThreadGroup, APeerThatThrowsIsNoticedAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  std::atomic<int> noticed{0};
  const Error error = error_of([&] {
    run_ranks(4, [&](Group& group) {
      if (group.rank() == 2) {
        std::this_thread::sleep_for(10ms);
        throw Error(ErrorCode::corrupt, "broken");
      }
      const Error seen = error_of([&] { group.barrier(); });
      EXPECT_EQ(seen.code(), ErrorCode::peer_failed);
      EXPECT_NE(seen.message().find("rank 2 failed: corrupt: broken"), std::string::npos);
      // The group stays broken.
      EXPECT_EQ(error_of([&] { (void)group.all_gather({}); }).code(), ErrorCode::peer_failed);
      ++noticed;
      throw seen;
    });
  });
  EXPECT_EQ(noticed, 3);
  EXPECT_EQ(error.code(), ErrorCode::corrupt);  // not rank 0's "a peer failed"
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST(ThreadGroup, APeerThatReturnsIsNoticedAtOnce) {
  const auto begin = std::chrono::steady_clock::now();
  const Error error = error_of([&] {
    run_ranks(2, [&](Group& group) {
      if (group.rank() == 0) group.barrier();
    });
  });
  EXPECT_EQ(error.code(), ErrorCode::peer_failed);
  EXPECT_EQ(error.message(), "rank 1 has returned");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
}

TEST(ThreadGroup, AResultSurvivesAPeerThatLeavesRightAfter) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    run_ranks(3,
              [&](Group& group) { EXPECT_EQ(group.all_gather(message(group.rank())).size(), 3U); });
  }
}

TEST(ThreadGroup, TheDeadlineEndsTheWaitForARankThatDoesNotCome) {
  const Error error = error_of([&] {
    run_ranks(
        3,
        [&](Group& group) {
          if (group.rank() == 1) std::this_thread::sleep_for(2s);
          const Error seen = error_of([&] { group.barrier(); });
          EXPECT_EQ(seen.code(), ErrorCode::timeout);
          EXPECT_EQ(seen.message(), "barrier waited 500 ms for rank 1");
          throw seen;
        },
        500ms);
  });
  EXPECT_EQ(error.code(), ErrorCode::timeout);
}

TEST(ThreadGroup, DifferentCallsAreAMismatchOnEveryRank) {
  std::atomic<int> seen{0};
  run_ranks(3, [&](Group& group) {
    const Error error = error_of([&] {
      if (group.rank() == 1) {
        (void)group.gather({}, 0);
      } else {
        group.barrier();
      }
    });
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    ++seen;
  });
  EXPECT_EQ(seen, 3);
}

TEST(ThreadGroup, BadArgumentsFailOnEveryRankWithoutWaiting) {
  std::atomic<int> seen{0};
  run_ranks(3, [&](Group& group) {
    EXPECT_EQ(error_of([&] {
                (void)group.scatter({{}, {}}, 0);
              }).code(),
              ErrorCode::invalid_argument);
    EXPECT_EQ(error_of([&] { (void)group.broadcast({}, 3); }).code(), ErrorCode::invalid_argument);
    group.barrier();
    ++seen;
  });
  EXPECT_EQ(seen, 3);
  EXPECT_EQ(error_of([] { run_ranks(0, [](Group&) {}); }).code(), ErrorCode::invalid_argument);
}

TEST(ThreadGroup, AnyExceptionComesBack) {
  EXPECT_THROW(run_ranks(2,
                         [](Group& group) {
                           if (group.rank() == 1) throw std::logic_error("x");
                           group.barrier();
                         }),
               std::logic_error);
}

TEST(ThreadGroup, MessagesForDifferentPurposesDoNotMeet) {
  try {
    run_ranks(3, [](Group& group) {
      if (group.rank() == 1) return agree(group, "op", [] {});
      static_cast<void>(group.all_gather(message(1)));
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        error.what(),
        "mismatch: rank 0 called all_gather, rank 1 called gather with root 0 for an agreement");
  }
}

}  // namespace
}  // namespace tessera
