#include "comm/long_work.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "base/parallel.h"
#include "comm/testing.h"
#include "conformance/forwarding_group.h"

namespace tessera {
namespace {

// Goes on until it is asked to stop, and throws then.
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

// A group that carries no interrupts, as one of a user's own may be.
class Plain final : public testing_support::ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  [[nodiscard]] bool carries_interrupts() const noexcept override { return false; }
  void interrupt() override { ADD_FAILURE() << "it was asked to interrupt"; }
  [[nodiscard]] std::stop_token interrupted() override { return {}; }
};

TEST(LongWork, ReturnsWhenAllAreDone) {
  EXPECT_TRUE(codes(3, kNothing, [](int, const std::stop_token&) {}).empty());
}

TEST(LongWork, WithoutInterruptsRanksAskOneAnother) {
  std::atomic<int> failed = 0;
  run_ranks(3, [&](Group& carrying) {
    Plain group(carrying);
    ASSERT_FALSE(group.carries_interrupts());
    agree_on_long_work(group, "working", {}, [](const std::stop_token&) {});
    const auto fail_or_wait = [&](const std::stop_token& stop) {
      if (group.rank() == 1) throw Error(ErrorCode::out_of_space, "full");
      until_stopped(stop);
    };
    try {
      agree_on_long_work(group, "working", {}, fail_or_wait);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::out_of_space) << error.what();
      ++failed;
    }
  });
  EXPECT_EQ(failed, 3);
}

// An interrupt is of the work before one fold, whoever comes to it late, and not of what follows.
// So what it sends is counted there, whichever thread does it.
TEST(LongWork, TheWorkBelongsToTheJobOfItsCaller) {
  std::atomic<int> settling = 0;
  run_ranks(2, [&](Group& carrying) {
    Plain group(carrying);
    const Settling all;
    agree_on_long_work(group, "working", {}, [&](const std::stop_token&) {
      settling += Settling::is_under_way() ? 1 : 0;
    });
  });
  EXPECT_EQ(settling, 2);
}

TEST(LongWork, AnInterruptEndsWithItsFold) {
  std::atomic<int> done = 0;
  run_ranks(3, [&](Group& group) {
    for (int round = 0; round < 20; ++round) {
      try {
        agree_on_long_work(group, "working", {}, [&](const std::stop_token& stop) {
          if (round % 2 == 0) return;
          if (group.rank() == round % 3) throw Error(ErrorCode::io, "disk");
          until_stopped(stop);
        });
        EXPECT_EQ(round % 2, 0);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
        EXPECT_EQ(error.peers().size(), 1U);
      }
    }
    ++done;
  });
  EXPECT_EQ(done, 3);
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
