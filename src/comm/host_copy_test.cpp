#include "comm/host_copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include "conformance/errors.h"
#include "conformance/forwarding_group.h"

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
class Counted final : public testing::ForwardingGroup {
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

}  // namespace
}  // namespace tessera
