#include "comm/confer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <mutex>

#include "comm/text.h"

namespace tessera {
namespace {

Bytes joined(const Bytes& left, const Bytes& right) {
  return to_bytes(to_text(left) + "," + to_text(right));
}

Conference ranks_of(const Group& group) {
  return {[&group] { return to_bytes(std::to_string(group.rank())); }, joined,
          [](const Bytes& all) { return to_bytes("all: " + to_text(all)); }};
}

// What each rank got: its error, or none.
std::map<int, Error> outcomes(int ranks, const std::function<Conference(Group&)>& conference) {
  std::mutex mutex;
  std::map<int, Error> seen;
  run_ranks(ranks, [&](Group& group) {
    try {
      (void)confer(group, "planning", conference(group));
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      seen.emplace(group.rank(), error);
    }
    group.barrier();  // the group still works
  });
  return seen;
}

TEST(Confer, AllRanksGetWhatRankZeroConcludes) {
  std::atomic<int> checked = 0;
  run_ranks(5, [&](Group& group) {
    EXPECT_EQ(to_text(confer(group, "planning", ranks_of(group))), "all: 0,1,2,3,4");
    ++checked;
  });
  EXPECT_EQ(checked, 5);
  const auto alone = solo_group();
  EXPECT_EQ(to_text(confer(*alone, "planning", ranks_of(*alone))), "all: 0");
}

TEST(Confer, WhateverFailsFailsOnAllRanks) {
  const Error failure(ErrorCode::mismatch, "unlike");
  const auto of_contribute = [&](Group& group) {
    Conference conference = ranks_of(group);
    if (group.rank() == 2) conference.contribute = [&]() -> Bytes { throw Error(failure); };
    return conference;
  };
  const auto of_combine = [&](Group& group) {
    Conference conference = ranks_of(group);
    conference.combine = [&](const Bytes&, const Bytes&) -> Bytes { throw Error(failure); };
    return conference;
  };
  const auto of_conclude = [&](Group& group) {
    Conference conference = ranks_of(group);
    conference.conclude = [&](const Bytes&) -> Bytes { throw Error(failure); };
    return conference;
  };
  for (const auto& conference :
       std::vector<std::function<Conference(Group&)>>{of_contribute, of_combine, of_conclude}) {
    const auto seen = outcomes(4, conference);
    ASSERT_EQ(seen.size(), 4U);
    for (const auto& [rank, error] : seen) {
      EXPECT_EQ(error.code(), ErrorCode::mismatch) << error.what();
      ASSERT_EQ(error.peers().size(), 1U);
      EXPECT_EQ(error.peers().begin()->second.message(), "unlike");
    }
  }
}

// Texts of 65,536 ranks that all fail would be a message of megabytes on every rank.
TEST(Confer, SixteenFailuresAreNamedAndAllAreCounted) {
  const auto seen = outcomes(40, [](Group& group) {
    Conference conference = ranks_of(group);
    if (group.rank() > 0) {
      conference.contribute = [&group]() -> Bytes {
        throw Error(ErrorCode::io, "disk " + std::to_string(group.rank()));
      };
    }
    return conference;
  });
  ASSERT_EQ(seen.size(), 40U);
  for (const auto& [rank, error] : seen) {
    ASSERT_EQ(error.peers().size(), 16U);
    EXPECT_EQ(error.peers().begin()->first, 1);
    EXPECT_EQ(error.peers().rbegin()->first, 16);
    EXPECT_NE(std::string(error.what()).find("; 23 more ranks failed"), std::string::npos)
        << error.what();
  }
}

}  // namespace
}  // namespace tessera
