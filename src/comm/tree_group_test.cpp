#include "comm/tree_group.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <latch>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "base/parallel.h"
#include "comm/long_work.h"
#include "comm/message.h"
#include "comm/testing.h"
#include "comm/whereabouts.h"
#include "conformance/errors.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using namespace std::chrono_literals;

// Blocks on the way from one rank to another. A sender waits when two have not been taken.
class Channel {
 public:
  void send(std::span<const std::byte> bytes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || (!frozen_ && blocks_.size() < 2); });
    if (closed_) throw Error(ErrorCode::peer_failed, "closed");
    blocks_.emplace_back(bytes.begin(), bytes.end());
    changed_.notify_all();
  }
  void receive(std::span<std::byte> bytes) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return closed_ || (!frozen_ && !blocks_.empty()); });
    if (blocks_.empty()) throw Error(ErrorCode::peer_failed, "closed");
    ASSERT_EQ(blocks_.front().size(), bytes.size());
    std::ranges::copy(blocks_.front(), bytes.begin());
    blocks_.pop_front();
    changed_.notify_all();
  }
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  void freeze(bool frozen) {
    const std::lock_guard lock(mutex_);
    frozen_ = frozen;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Bytes> blocks_;
  bool closed_ = false;
  bool frozen_ = false;
};

class MemoryWire final : public Wire {
 public:
  MemoryWire(Channel& out, Channel& in) : out_(out), in_(in) {}
  ~MemoryWire() override { close(); }
  void send(std::span<const std::byte> bytes) override { out_.send(bytes); }
  void receive(std::span<std::byte> bytes) override { in_.receive(bytes); }
  void shut_down() noexcept override { close(); }

 private:
  void close() {
    out_.close();
    in_.close();
  }
  Channel& out_;
  Channel& in_;
};

// The connections between ranks that are threads.
class Net {
 public:
  std::unique_ptr<Wire> connect(int rank, int peer) {
    return std::make_unique<MemoryWire>(between(rank, peer), between(peer, rank));
  }
  // As when the process of the rank is stopped.
  void freeze(int rank, bool frozen = true) {
    of_each(rank, [=](Channel& channel) { channel.freeze(frozen); });
  }
  // As when it is killed: it says nothing of the first connection by the others.
  void cut(int rank) {
    freeze(rank);
    of_each(rank, [](Channel& channel) { channel.close(); });
  }

 private:
  Channel& between(int from, int to) {
    const std::lock_guard lock(mutex_);
    return channels_[{from, to}];
  }
  template <typename Work>
  void of_each(int rank, const Work& work) {
    const std::lock_guard lock(mutex_);
    for (auto& [ends, channel] : channels_)
      if (ends.first == rank || ends.second == rank) work(channel);
  }
  std::mutex mutex_;
  std::map<std::pair<int, int>, Channel> channels_;
};

struct Ranks {
  int count = 2;
  TreeOptions options = {};
  std::chrono::milliseconds deadline = 30s;
  int absent = -1;  // this rank never comes
};

// Runs `body` on each rank when all have come; the errors that ranks got.
std::map<int, Error> failures_of(const Ranks& ranks,
                                 const std::function<void(Group&, Net&)>& body) {
  Net net;
  std::mutex mutex;
  std::map<int, Error> failures;
  std::latch come(ranks.count);
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < ranks.count; ++rank) {
    if (rank == ranks.absent) continue;
    threads.emplace_back([&, rank] {
      try {
        const auto group = make_tree_group(
            rank, ranks.count, ranks.options, ranks.deadline,
            [&](int peer) { return peer == ranks.absent ? nullptr : net.connect(rank, peer); });
        come.arrive_and_wait();
        body(*group, net);
      } catch (const Error& error) {
        const std::lock_guard lock(mutex);
        failures.emplace(rank, error);
      }
    });
  }
  threads.clear();
  return failures;
}

void run_tree(int count, const std::function<void(Group&)>& body) {
  const auto failures = failures_of({.count = count}, [&](Group& group, Net&) { body(group); });
  for (const auto& [rank, error] : failures) ADD_FAILURE() << rank << ": " << error.what();
}

// All ranks but `without` failed with `code` and a message that has `text`.
void expect_all(const std::map<int, Error>& failures, const Ranks& ranks, int without,
                ErrorCode code, const std::string& text) {
  for (int rank = 0; rank < ranks.count; ++rank) {
    if (rank == without) continue;
    const auto found = failures.find(rank);
    ASSERT_NE(found, failures.end()) << rank;
    EXPECT_EQ(found->second.code(), code) << rank << ": " << found->second.what();
    EXPECT_THAT(found->second.what(), HasSubstr(text)) << rank;
  }
}

Bytes appended(Bytes left, const Bytes& right) {
  left.insert(left.end(), right.begin(), right.end());
  return left;
}

TEST(TreeGroup, FoldsInRankOrderAndSpreads) {
  for (const int count : {1, 2, 3, 33, 34, 64}) {
    std::string expected;
    for (int rank = 0; rank < count; ++rank) expected += std::to_string(rank) + " ";
    run_tree(count, [&](Group& group) {
      EXPECT_EQ(group.size(), count);
      for (int round = 0; round < 3; ++round) {
        const Bytes all = group.fold(to_bytes(std::to_string(group.rank()) + " "), appended);
        EXPECT_EQ(to_text(all), group.rank() == 0 ? expected : "");
        EXPECT_EQ(to_text(group.spread(group.rank() == 0 ? all : Bytes())), expected);
      }
    });
  }
}

TEST(TreeGroup, DoesWhatEveryGroupDoes) {
  constexpr int kCount = 40;
  std::atomic<int> arrived = 0;
  run_tree(kCount, [&](Group& group) {
    const auto of = [](int rank) {
      return to_bytes(std::string(static_cast<std::size_t>(rank), 'x'));
    };
    std::vector<Bytes> each;
    for (int rank = 0; rank < kCount; ++rank) each.push_back(of(rank));
    ++arrived;
    group.barrier();
    EXPECT_EQ(arrived, kCount);
    EXPECT_EQ(group.all_gather(of(group.rank())), each);
    for (const int root : {0, 7, kCount - 1}) {
      const bool here = group.rank() == root;
      EXPECT_EQ(group.gather(of(group.rank()), root), here ? each : std::vector<Bytes>());
      EXPECT_EQ(group.broadcast(here ? to_bytes("hello") : Bytes(), root), to_bytes("hello"));
      EXPECT_EQ(group.scatter(here ? each : std::vector<Bytes>(), root), of(group.rank()));
    }
    EXPECT_THROW((void)group.gather({}, kCount), Error);
  });
}

TEST(TreeGroup, AScatterOfTooFewMessagesIsRefusedOnAllRanks) {
  std::atomic<int> refused = 0;
  run_tree(3, [&](Group& group) {
    try {
      (void)group.scatter({{}, {}}, 1);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::invalid_argument);
      ++refused;
    }
    group.barrier();
  });
  EXPECT_EQ(refused, 3);
}

TEST(TreeGroup, CarriesLargeMessages) {
  constexpr std::size_t kSize = (std::size_t{64} << 20) + 5;
  run_tree(3, [](Group& group) {
    Bytes mine(group.rank() == 2 ? kSize : 7, static_cast<std::byte>(group.rank() + 1));
    const Bytes all = group.fold(std::move(mine), appended);
    const Bytes told = group.spread(all);
    ASSERT_EQ(told.size(), kSize + 14);
    EXPECT_EQ(told[13], std::byte{2});
    EXPECT_TRUE(std::all_of(told.begin() + 14, told.end(),
                            [](std::byte byte) { return byte == std::byte{3}; }));
  });
}

// An interrupt is of the work before one fold, whoever comes to it late, and not of what follows.
TEST(TreeGroup, AFailureEndsTheLongWorkOfAllAndOfThatWorkAlone) {
  for (const int count : {2, 3, 40}) {
    run_tree(count, [&](Group& group) {
      for (int round = 0; round < 10; ++round) {
        try {
          agree_on_long_work(group, "working", {}, [&](const std::stop_token& stop) {
            if (round % 2 == 0) return;
            if (group.rank() == round % count) throw Error(ErrorCode::out_of_space, "full");
            until_stopped(stop);  // would not return otherwise
          });
          EXPECT_EQ(round % 2, 0);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::out_of_space) << error.what();
          EXPECT_EQ(error.peers().size(), 1U);
        }
      }
    });
  }
}

TEST(TreeGroup, TwoThreadsAtOnceAreAConflict) {
  std::latch refused(1);
  run_tree(2, [&](Group& group) {
    if (group.rank() == 1) {
      refused.wait();
      EXPECT_EQ(group.all_gather({}).size(), 2U);
      return;
    }
    // One of the two threads is in a call that cannot end before the other was refused.
    const auto call = [&] {
      try {
        EXPECT_EQ(group.all_gather({}).size(), 2U);
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::conflict) << error.what();
        refused.count_down();
      }
    };
    std::thread other(call);
    call();
    other.join();
  });
  EXPECT_TRUE(refused.try_wait());
}

TEST(TreeGroup, WhoIsSlowButAliveIsWaitedFor) {
  const Ranks ranks{.count = 36, .options = {.silence = 200ms}};
  const auto failures = failures_of(ranks, [](Group& group, Net&) {
    if (group.rank() == 35) std::this_thread::sleep_for(800ms);
    group.barrier();
  });
  for (const auto& [rank, error] : failures) ADD_FAILURE() << rank << ": " << error.what();
}

TEST(TreeGroup, WhoDoesNotComeIsNamedAtTheLimit) {
  const Ranks ranks{.count = 36, .options = {.silence = 1s, .longest_wait = 2s}};
  for (const int late : {0, 1, 2}) {  // rank 2 is a child of rank 1
    std::latch over(ranks.count - 1);
    const auto failures = failures_of(ranks, [&](Group& group, Net&) {
      if (group.rank() == late) {
        over.wait();
        return;
      }
      try {
        group.barrier();
      } catch (...) {
        over.count_down();
        throw;
      }
      over.count_down();
    });
    expect_all(failures, ranks, late, ErrorCode::timeout,
               "rank " + std::to_string(late) + " is alive but did not come to barrier");
  }
}

TEST(TreeGroup, AtTheLimitTheProgressOfWhoDoesNotComeIsSaid) {
  const Ranks ranks{.count = 2, .options = {.silence = 400ms, .longest_wait = 1s}};
  std::latch over(1);
  const auto failures = failures_of(ranks, [&](Group& group, Net&) {
    if (group.rank() == 1) {
      group.make_progress(123);
      over.wait();
      return;
    }
    const std::string said = [&] {
      try {
        group.barrier();
      } catch (const Error& error) {
        return std::string(error.what());
      }
      return std::string();
    }();
    EXPECT_THAT(said, HasSubstr("it has moved 123 bytes so far"));
    over.count_down();
  });
  EXPECT_TRUE(failures.empty());
}

TEST(TreeGroup, WhoIsStoppedIsNamedOnAllRanks) {
  const Ranks ranks{.count = 36, .options = {.silence = 300ms}};
  for (const int stopped : {0, 1, 2, 35}) {
    std::latch over(ranks.count - 1);
    const auto failures = failures_of(ranks, [&](Group& group, Net& net) {
      if (group.rank() == stopped) {
        net.freeze(stopped);
        over.wait();
        return;
      }
      for (int call = 0; call < 2; ++call) {
        try {
          group.barrier();
        } catch (const Error&) {
          if (call == 0) continue;
          over.count_down();
          throw;
        }
      }
      over.count_down();
    });
    expect_all(failures, ranks, stopped, ErrorCode::timeout,
               "rank " + std::to_string(stopped) + " has given no sign of life for 300 ms");
  }
}

// What the others said while it did not listen lies in its connections when it runs again.
TEST(TreeGroup, WhoWasStoppedHearsThatTheOthersHaveGivenUp) {
  const Ranks ranks{.count = 3, .options = {.silence = 1000ms}};
  std::latch given_up(2), heard(1);
  const auto failures = failures_of(ranks, [&](Group& group, Net& net) {
    (void)group.fold({}, [](Bytes left, const Bytes&) { return left; });
    if (group.rank() == 0) {
      EXPECT_NO_THROW(group.require_peers());
      net.freeze(0);
      given_up.wait();
      net.freeze(0, false);
      EXPECT_THAT(error_of([&] { group.require_peers(); }).what(),
                  HasSubstr("rank 0 has given no sign of life"));
      heard.count_down();
      return;
    }
    try {
      (void)group.spread({});
    } catch (const Error&) {
      given_up.count_down();
      heard.wait();
      throw;
    }
  });
  expect_all(failures, ranks, 0, ErrorCode::timeout, "rank 0 has given no sign of life");
}

TEST(TreeGroup, AMessageToWhoIsStoppedDoesNotBlockForever) {
  const Ranks ranks{.count = 3, .options = {.silence = 300ms}};
  std::latch over(2);
  const auto failures = failures_of(ranks, [&](Group& group, Net& net) {
    if (group.rank() == 2) {
      net.freeze(2);
      over.wait();
      return;
    }
    try {
      (void)group.spread(Bytes(std::size_t{16} << 20));
      group.barrier();
    } catch (...) {
      over.count_down();
      throw;
    }
  });
  expect_all(failures, ranks, 2, ErrorCode::timeout, "rank 2 has given no sign of life");
}

TEST(TreeGroup, WhoIsKilledIsNamedOnAllRanksAndTheWorkEnds) {
  const Ranks ranks{.count = 36};
  for (const int killed : {0, 1, 2, 35}) {
    const auto failures = failures_of(ranks, [&](Group& group, Net& net) {
      group.barrier();
      if (group.rank() == killed) {
        net.cut(killed);
        return;
      }
      agree_on_long_work(group, "working", {}, until_stopped);
    });
    expect_all(failures, ranks, killed, ErrorCode::peer_failed,
               "rank " + std::to_string(killed) + " is gone");
  }
}

TEST(TreeGroup, WhoLeavesIsMissedOnlyByThoseWhoNeedIt) {
  const Ranks ranks{.count = 3};
  std::atomic<int> fine = 0;
  const auto failures = failures_of(ranks, [&](Group& group, Net&) {
    group.barrier();
    if (group.rank() == 1) return;
    std::this_thread::sleep_for(100ms);
    ++fine;
    group.barrier();
  });
  EXPECT_EQ(fine, 2);
  expect_all(failures, ranks, 1, ErrorCode::peer_failed, "rank 1 has left");
}

TEST(TreeGroup, RanksThatCallDifferentThingsLearnIt) {
  using Call = std::function<void(Group&)>;
  const Call fold = [](Group& group) { (void)group.fold({}, appended); };
  const Call spread = [](Group& group) { (void)group.spread({}); };
  const Call barrier = [](Group& group) { group.barrier(); };
  const Call saving = [](Group& group) {
    const Purpose purpose("saving");
    group.barrier();
  };
  const Ranks ranks{.count = 3};
  const std::vector<std::pair<Call, Call>> pairs{
      {fold, spread}, {spread, fold}, {barrier, saving}, {barrier, fold}, {spread, barrier}};
  for (const auto& pair : pairs) {
    const auto failures = failures_of(ranks, [&](Group& group, Net&) {
      (group.rank() == 1 ? pair.second : pair.first)(group);
      group.barrier();
    });
    expect_all(failures, ranks, -1, ErrorCode::mismatch, "rank 1 called");
  }
}

TEST(TreeGroup, AnExceptionOfCombineBreaksTheGroup) {
  const Ranks ranks{.count = 3};
  const auto failures = failures_of(ranks, [&](Group& group, Net&) {
    (void)group.fold({}, [](const Bytes&, const Bytes&) -> Bytes { throw std::bad_alloc(); });
    group.barrier();
  });
  expect_all(failures, ranks, -1, ErrorCode::io, "no memory is left");
}

// Rank 1 of two, by hand.
TEST(TreeGroup, AFrameThatMakesNoSenseBreaksTheGroup) {
  for (const int kind : {0, 1, 2, 7, 200}) {  // a letter without a name, ..., kinds that are none
    Net net;
    std::thread peer([&] {
      const auto wire = net.connect(1, 0);
      Bytes frame(512);
      frame[0] = static_cast<std::byte>(kind);
      wire->send(frame);
      try {
        while (true) wire->receive(frame);
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch)
      }
    });
    try {
      (void)make_tree_group(0, 2, {}, 30s, [&](int) { return net.connect(0, 1); });
      ADD_FAILURE() << kind;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::corrupt) << error.what();
      EXPECT_THAT(error.what(), HasSubstr("rank 1"));
    }
    peer.join();
  }
}

TEST(TreeGroup, WhoNeverComesIsNamed) {
  const Ranks ranks{.count = 36, .deadline = 300ms, .absent = 3};
  const auto failures = failures_of(ranks, [](Group&, Net&) {});
  expect_all(failures, ranks, 3, ErrorCode::timeout, "rank 3 has not come");
}

}  // namespace
}  // namespace tessera
