#include <chrono>
#include <csignal>
#include <cstring>
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "same_host/same_host.h"
#include "testing.h"

namespace tessera::same_host {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr RingSize kTiny{.slots = 2, .slot_bytes = 64};

// Every rank's `rounds` numbers for all ranks; the sums of those in `out`.
Call sums_call(const Exchange& exchange, std::int64_t rounds, int seed,
               std::vector<std::int64_t>& out) {
  out.assign(static_cast<std::size_t>(rounds), 0);
  return {.name = "sums " + std::to_string(seed) + " x " + std::to_string(rounds),
          .rounds = rounds,
          .put =
              [rank = exchange.rank(), seed](std::int64_t round, std::byte* slot) {
                const std::int64_t value = seed * 1000 + round * 10 + rank;
                std::memcpy(slot, &value, sizeof value);
              },
          .take =
              [&out](std::int64_t round, std::span<const std::byte* const> slots) {
                for (const auto* slot : slots) {
                  std::int64_t value = 0;
                  std::memcpy(&value, slot, sizeof value);
                  out[static_cast<std::size_t>(round)] += value;
                }
              }};
}

std::vector<std::int64_t> expected_sums(int ranks, std::int64_t rounds, int seed) {
  std::vector<std::int64_t> sums;
  for (std::int64_t round = 0; round < rounds; ++round)
    sums.push_back(ranks * (seed * 1000 + round * 10) + ranks * (ranks - 1) / 2);
  return sums;
}

void add_up(Exchange& exchange, std::int64_t rounds, int seed,
            std::chrono::milliseconds deadline = 10s) {
  std::vector<std::int64_t> sums;
  exchange.wait(exchange.start(sums_call(exchange, rounds, seed, sums)), deadline);
  ASSERT_EQ(sums, expected_sums(exchange.size(), rounds, seed));
}

TEST(Exchange, CallsOfManyRoundsPassThroughASmallRing) {
  for (const int ranks : {1, 2, 3, 4}) {
    run_exchange(ranks, kTiny, [](Exchange& exchange) {
      for (int seed = 0; seed < 200; ++seed) add_up(exchange, 1 + seed % 7, seed);
    });
  }
}

TEST(Exchange, SeveralCallsAreUnderWayAndAnyIsWaitedForFirst) {
  run_exchange(3, {.slots = 8, .slot_bytes = 64}, [](Exchange& exchange) {
    std::mt19937 random(static_cast<unsigned>(exchange.rank()));  // ranks differ in what they await
    for (int repeat = 0; repeat < 100; ++repeat) {
      std::vector<std::vector<std::int64_t>> sums(6);
      std::vector<std::uint64_t> numbers;
      for (int i = 0; i < 6; ++i)
        numbers.push_back(exchange.start(
            sums_call(exchange, 1 + i * 3, repeat * 6 + i, sums[static_cast<std::size_t>(i)])));
      std::vector<std::size_t> order{0, 1, 2, 3, 4, 5};
      std::shuffle(order.begin(), order.end(), random);
      for (const auto i : order) {
        if (random() % 2 == 0) {
          exchange.wait(numbers[i], 10s);
        } else {
          while (!exchange.done(numbers[i])) std::this_thread::yield();
        }
        ASSERT_EQ(sums[i], expected_sums(3, 1 + static_cast<std::int64_t>(i) * 3,
                                         repeat * 6 + static_cast<int>(i)));
      }
    }
  });
}

TEST(Exchange, OneSourceIsAwaitedAlone) {
  std::atomic<bool> served = false;
  run_exchange(3, kTiny, [&](Exchange& exchange) {
    const auto late = [&](std::int64_t, std::byte*) {
      while (exchange.rank() == 2 && !served) std::this_thread::yield();
    };
    exchange.wait(exchange.start({.name = "from 0", .source = 0, .put = late}), 10s);
    if (exchange.rank() == 1) served = true;  // rank 2 has not even come
    exchange.wait(exchange.start({.name = "barrier"}), 10s);
  });
}

TEST(Exchange, DifferentCallsAreAMismatchOnAll) {
  run_exchange(2, kTiny, [](Exchange& exchange) {
    const auto name = exchange.rank() == 0 ? "gather of 4 bytes" : "sum of 8 bytes";
    const auto error = error_of([&] { exchange.wait(exchange.start({.name = name}), 10s); });
    EXPECT_TRUE(error.code() == ErrorCode::mismatch || error.code() == ErrorCode::peer_failed);
    EXPECT_THAT(error.message(), HasSubstr("gather of 4 bytes"));
    EXPECT_THAT(error.message(), HasSubstr("sum of 8 bytes"));
    // Broken for good.
    EXPECT_EQ(code_of([&] { exchange.start({.name = "barrier"}); }), error.code());
    EXPECT_EQ(code_of([&] { static_cast<void>(exchange.done(0)); }), error.code());
  });
}

TEST(Exchange, WhoLeavesIsMissedAtOnceAndWhoIsLateAtTheDeadline) {
  run_exchange(2, kTiny, [](Exchange& exchange) {
    add_up(exchange, 5, 1);
    if (exchange.rank() == 1) return;
    const auto start = std::chrono::steady_clock::now();
    const auto error = error_of([&] { add_up(exchange, 5, 2); });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_THAT(error.message(), HasSubstr("rank 1 has left"));
    EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
  });
  run_exchange(2, kTiny, [](Exchange& exchange) {
    if (exchange.rank() == 1) return std::this_thread::sleep_for(600ms);
    const auto error = error_of([&] { add_up(exchange, 5, 2, 200ms); });
    EXPECT_EQ(error.code(), ErrorCode::timeout);
    EXPECT_THAT(error.message(), HasSubstr("rank 1 did not come to sums 2 x 5"));
  });
}

TEST(Exchange, AFailureTravelsToRanksThatAwaitOthers) {
  run_exchange(3, kTiny, [](Exchange& exchange) {
    const int rank = exchange.rank();
    if (rank == 2) return;  // 1 awaits 2 and never comes to what 0 awaits
    const auto error = error_of([&] {
      const auto first = exchange.start({.name = "first", .source = rank == 1 ? 2 : kNobody});
      if (rank == 1) exchange.wait(first, 10s);
      exchange.wait(exchange.start({.name = "second", .source = 1}), 10s);
    });
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    EXPECT_THAT(error.message(), HasSubstr("rank 2 has left"));
    if (rank == 0) {
      EXPECT_THAT(error.message(), HasSubstr("rank 1 has failed"));
    }
  });
}

TEST(Exchange, WhatACallThrowsIsAFailureOfItsRank) {
  for (const bool in_put : {true, false}) {
    run_exchange(2, kTiny, [&](Exchange& exchange) {
      Call call{.name = "call"};
      if (exchange.rank() == 0) {
        const auto refuse = [] { throw std::runtime_error("no memory left"); };
        if (in_put) {
          call.put = [=](std::int64_t, std::byte*) { refuse(); };
        } else {
          call.take = [=](std::int64_t, std::span<const std::byte* const>) { refuse(); };
        }
      }
      const auto error = error_of([&] {
        exchange.wait(exchange.start(call), 10s);
        add_up(exchange, 5, 1);
      });
      EXPECT_EQ(error.code(), ErrorCode::peer_failed);
      EXPECT_THAT(error.message(), HasSubstr("no memory left"));
    });
  }
}

TEST(Exchange, AbortEndsAWaitOfAnotherThread) {
  run_exchange(2, kTiny, [](Exchange& exchange) {
    if (exchange.rank() == 1) return std::this_thread::sleep_for(1s);
    std::thread killer([&] {
      std::this_thread::sleep_for(100ms);
      exchange.abort();
    });
    EXPECT_THAT(error_of([&] { add_up(exchange, 5, 2, 30s); }).message(), HasSubstr("aborted"));
    killer.join();
  });
}

TEST(Meeting, NobodyTakesPartWhenOneDoesNotWant) {
  MapBoard board;
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto meeting = meet(board, rank, 3, {.wanted = rank != 1, .deadline = 10s});
      EXPECT_EQ(meeting.exchange, nullptr);
      EXPECT_EQ(meeting.reason, "rank 1: switched off");
    });
  }
  for (auto& rank : ranks) rank.join();
}

TEST(Meeting, AHostThatIsAnotherIsNotJoined) {
  MapBoard board;
  board.post("process/1", "yes another-boot/pid:[1] 1 1");
  const auto meeting = meet(board, 0, 2, {.deadline = 10s});
  EXPECT_EQ(meeting.exchange, nullptr);
  EXPECT_THAT(meeting.reason, HasSubstr("not on the host"));
}

TEST(Meeting, MemoryThatIsNotWhatWasAnnouncedIsRefusedByAll) {
  MapBoard board;
  auto other = Segment::create(segment_bytes(2, {}));
  board.post("process/0", "yes " + to_text(this_process()));
  board.post("segment", "yes " + std::to_string(other.descriptor()) + " a-secret");
  board.post("mapped/0", "yes ");
  const auto meeting = meet(board, 1, 2, {.deadline = 10s});
  EXPECT_EQ(meeting.exchange, nullptr);
  EXPECT_THAT(meeting.reason, HasSubstr("rank 1: found other shared memory"));
}

TEST(Meeting, ARankThatDoesNotComeIsATimeout) {
  MapBoard board;
  EXPECT_EQ(code_of([&] { static_cast<void>(meet(board, 0, 2, {.deadline = 100ms})); }),
            ErrorCode::timeout);
}

std::size_t names_in_dev_shm() {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm"))
    count += entry.path().string().find("tessera") != std::string::npos ? 1 : 0;
  return count;
}

// A rank that adds up for ever. 0: a peer's end was noticed; 1: it was not.
int add_up_until_a_peer_ends(const std::filesystem::path& directory, int rank, int ranks) {
  DirectoryBoard board(directory);
  try {
    const auto meeting = meet(board, rank, ranks, {.deadline = 500ms, .ring = kTiny});
    if (!meeting.exchange) return 2;
    const std::ofstream met(directory / ("met." + std::to_string(rank)));
    for (int seed = 0;; ++seed) {
      std::vector<std::int64_t> sums;
      auto& exchange = *meeting.exchange;
      exchange.wait(exchange.start(sums_call(exchange, 4, seed, sums)), 20s);
      if (sums != expected_sums(ranks, 4, seed)) return 3;
    }
  } catch (const Error& error) {
    // Only a peer that died before it said who it is can be missed by nothing but the deadline.
    const bool early = error.code() == ErrorCode::timeout &&
                       !std::filesystem::exists(directory / ("met." + std::to_string(rank)));
    return error.code() == ErrorCode::peer_failed || early ? 0 : 1;
  }
}

TEST(ExchangeOfProcesses, AKilledRankIsNoticedByAllAndLeavesNothing) {
  const auto before = names_in_dev_shm();
  for (int victim = 0; victim < 3; ++victim) {
    const TemporaryDirectory directory;
    const std::filesystem::path board(directory.path());
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.push_back(run_process([&] { return add_up_until_a_peer_ends(board, rank, 3); }));
    for (int rank = 0; rank < 3; ++rank) {
      while (!std::filesystem::exists(board / ("met." + std::to_string(rank))))
        std::this_thread::sleep_for(1ms);
    }
    std::this_thread::sleep_for(20ms);
    const auto start = std::chrono::steady_clock::now();
    ::kill(ranks[static_cast<std::size_t>(victim)], SIGKILL);
    for (int rank = 0; rank < 3; ++rank)
      EXPECT_EQ(end_of(ranks[static_cast<std::size_t>(rank)]), rank == victim ? -SIGKILL : 0);
    EXPECT_LT(std::chrono::steady_clock::now() - start, 2s);
  }
  EXPECT_EQ(names_in_dev_shm(), before);
}

TEST(ExchangeOfProcesses, AKillAtAnyMomentOfTheMeetingLeavesNobodyWaiting) {
  const auto before = names_in_dev_shm();
  std::mt19937 random(7);
  for (int repeat = 0; repeat < 30; ++repeat) {
    const TemporaryDirectory directory;
    const std::filesystem::path board(directory.path());
    const int victim = repeat % 2;
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 2; ++rank)
      ranks.push_back(run_process([&] { return add_up_until_a_peer_ends(board, rank, 2); }));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 6000));
    ::kill(ranks[static_cast<std::size_t>(victim)], SIGKILL);
    EXPECT_EQ(end_of(ranks[static_cast<std::size_t>(victim)]), -SIGKILL);
    EXPECT_EQ(end_of(ranks[static_cast<std::size_t>(1 - victim)]), 0);
  }
  EXPECT_EQ(names_in_dev_shm(), before);
}

TEST(ExchangeOfProcesses, TheLastCallIsCompleteAlthoughAPeerHasEnded) {
  for (int repeat = 0; repeat < 10; ++repeat) {
    const TemporaryDirectory directory;
    const std::filesystem::path board(directory.path());
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.push_back(run_process([&] {
        DirectoryBoard texts(board);
        const auto meeting = meet(texts, rank, 2, {.deadline = 10s, .ring = kTiny});
        std::vector<std::int64_t> sums;
        auto& exchange = *meeting.exchange;
        const auto number = exchange.start(sums_call(exchange, 3, 1, sums));
        if (rank == 1) std::this_thread::sleep_for(50ms);
        exchange.wait(number, 10s);
        return sums == expected_sums(2, 3, 1) ? 0 : 1;
      }));
    }
    for (const auto pid : ranks) EXPECT_EQ(end_of(pid), 0);
  }
}

}  // namespace
}  // namespace tessera::same_host
