#include "comm/host_copy.h"

#include <gtest/gtest.h>

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "comm/message.h"
#include "conformance/errors.h"
#include "conformance/forwarding_group.h"
#include "conformance/temporary_directory.h"
#include "testing.h"

namespace tessera {
namespace {

Bytes numbered(std::size_t size) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 256);
  return bytes;
}

void nothing() {}

HostCopy copied(Group& group, const Bytes& bytes, const HostCopyOptions& options = {}) {
  return copy_to_hosts(
      group, "telling", nothing, [&] { return bytes; }, options);
}

TEST(HostCopy, SmallBytesAreWithEveryRank) {
  const Bytes bytes = numbered(1000);
  std::atomic<int> good = 0;
  run_ranks(3, [&](Group& group) {
    const HostCopy copy = copied(group, group.rank() == 0 ? bytes : Bytes());
    if (std::ranges::equal(copy.bytes(), bytes) && !copy.is_shared()) ++good;
  });
  EXPECT_EQ(good, 3);
}

// The last window is shorter than the others.
TEST(HostCopy, LargeBytesAreSharedByTheRanksOfAHost) {
  const Bytes bytes = numbered(10'001);
  std::atomic<int> good = 0;
  run_ranks(4, [&](Group& group) {
    HostCopy copy = copied(group, group.rank() == 0 ? bytes : Bytes(), {100, 1000});
    const std::byte* const before = copy.bytes().data();
    const HostCopy moved(std::move(copy));
    if (std::ranges::equal(moved.bytes(), bytes) && moved.is_shared() &&
        moved.bytes().data() == before)
      ++good;
  });
  EXPECT_EQ(good, 4);
}

TEST(HostCopy, OneRankAloneKeepsWhatItMade) {
  const Bytes bytes = numbered(10'000);
  const HostCopy copy = copied(*solo_group(), bytes, {100, 1000});
  EXPECT_TRUE(std::ranges::equal(copy.bytes(), bytes));
  EXPECT_FALSE(copy.is_shared());
}

TEST(HostCopy, WhateverFailsFailsOnAllRanks) {
  for (const bool early : {true, false}) {
    std::atomic<int> failed = 0;
    run_ranks(3, [&](Group& group) {
      const auto refuse = [] { throw Error(ErrorCode::limit, "not today"); };
      const auto code = code_of([&] {
        (void)copy_to_hosts(
            group, "telling",
            [&] {
              if (early && group.rank() == 2) refuse();
            },
            [&] {
              if (!early) refuse();
              return numbered(10);
            });
      });
      if (code == ErrorCode::limit) ++failed;
      group.barrier();  // the group still works
    });
    EXPECT_EQ(failed, 3);
  }
}

// Counts what goes down to a rank.
class Counted final : public testing_support::ForwardingGroup {
 public:
  using ForwardingGroup::ForwardingGroup;
  Bytes spread(Bytes message) override {
    Bytes got = ForwardingGroup::spread(std::move(message));
    largest = std::max(largest, got.size());
    return got;
  }
  std::size_t largest = 0;
};

TEST(HostCopy, LargeBytesTravelByWindows) {
  const Bytes bytes = numbered(100'000);
  run_ranks(2, [&](Group& group) {
    Counted counted(group);
    (void)copied(counted, group.rank() == 0 ? bytes : Bytes(), {100, 1000});
    EXPECT_GE(counted.largest, 1000U);
    EXPECT_LT(counted.largest, 1100U);
  });
}

// Ranks as processes, whose messages are files.
class FileGroup final : public Group {
 public:
  FileGroup(const std::string& directory, int rank, int size)
      : board_(directory), rank_(rank), size_(size) {}
  [[nodiscard]] int rank() const noexcept override { return rank_; }
  [[nodiscard]] int size() const noexcept override { return size_; }
  void barrier() override { (void)all_gather({}); }
  std::vector<Bytes> gather(const Bytes& mine, int root) override {
    std::vector<Bytes> all = all_gather(mine);
    return rank_ == root ? all : std::vector<Bytes>();
  }
  std::vector<Bytes> all_gather(const Bytes& mine) override {
    const std::string call = std::to_string(calls_++) + ".";
    board_.post(call + std::to_string(rank_), to_text(mine));
    std::vector<Bytes> all;
    for (int peer = 0; peer < size_; ++peer) {
      std::optional<std::string> text;
      while (!(text = board_.read(call + std::to_string(peer)))) ::usleep(500);
      all.push_back(to_bytes(*text));
    }
    return all;
  }
  Bytes broadcast(const Bytes& message, int root) override {
    return all_gather(message)[static_cast<std::size_t>(root)];
  }
  Bytes scatter(const std::vector<Bytes>& messages, int root) override {
    (void)messages, (void)root;
    throw Error(ErrorCode::unsupported, "no test needs it");
  }

 private:
  DirectoryOfTexts board_;
  int rank_, size_, calls_ = 0;
};

std::string maps_of_this_process() {
  std::ifstream maps("/proc/self/maps");
  return {std::istreambuf_iterator<char>(maps), {}};
}

TEST(HostCopyOfProcesses, TheOthersMapTheMemoryOfTheLowestRank) {
  const TemporaryDirectory directory;
  const Bytes bytes = numbered(3 << 20);
  std::vector<pid_t> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.push_back(run_process([&] {
      FileGroup group(directory.path(), rank, 3);
      const HostCopy copy = copied(group, rank == 0 ? bytes : Bytes());
      const bool good = copy.is_shared() && std::ranges::equal(copy.bytes(), bytes) &&
                        maps_of_this_process().find("memfd:tessera") != std::string::npos;
      return good ? 0 : 1;
    }));
  }
  for (const pid_t rank : ranks) EXPECT_EQ(end_of(rank), 0);
}

}  // namespace
}  // namespace tessera
