#include <gtest/gtest.h>

#include <mutex>
#include <stdexcept>

#include "tessera/comm.h"

namespace tessera {
namespace {

// Runs `work` under agree on `ranks` ranks and returns what each rank got: its error, or none.
std::map<int, Error> outcomes(int ranks, const std::function<void(Group&)>& work) {
  std::mutex mutex;
  std::map<int, Error> seen;
  run_ranks(ranks, [&](Group& group) {
    try {
      agree(group, "writing", [&] { work(group); });
    } catch (const Error& error) {
      const std::lock_guard lock(mutex);
      seen.emplace(group.rank(), error);
    }
    group.barrier();  // the group still works
  });
  return seen;
}

TEST(Agree, ReturnsWhenAllSucceed) {
  EXPECT_TRUE(outcomes(4, [](Group&) {}).empty());
}

// P-03: 4 ranks, one failing, all see it.
TEST(Agree, AllRanksSeeTheOneThatFailed) {
  const auto seen = outcomes(4, [](Group& group) {
    if (group.rank() == 2) throw Error(ErrorCode::out_of_space, "full").at_path("x");
  });
  ASSERT_EQ(seen.size(), 4U);
  for (const auto& [rank, error] : seen) {
    EXPECT_EQ(error.code(), ErrorCode::out_of_space);
    ASSERT_EQ(error.peers().size(), 1U);
    EXPECT_EQ(error.peers().at(2).path(), "x");
    EXPECT_STREQ(error.what(), "out_of_space: rank 2: out_of_space: full [x] (writing)");
  }
}

// P-03: several failures are all in the map, whatever their type.
TEST(Agree, AllFailuresAreCollected) {
  const auto seen = outcomes(4, [](Group& group) {
    if (group.rank() == 0) throw std::runtime_error("plain");
    if (group.rank() == 1) throw 3;
    if (group.rank() == 3) throw Error(ErrorCode::corrupt, "bad");
  });
  ASSERT_EQ(seen.size(), 4U);
  for (const auto& [rank, error] : seen) {
    EXPECT_EQ(error.code(), ErrorCode::peer_failed);
    ASSERT_EQ(error.peers().size(), 3U);
    EXPECT_EQ(error.peers().at(0).code(), ErrorCode::io);
    EXPECT_EQ(error.peers().at(0).message(), "plain");
    EXPECT_EQ(error.peers().at(1).code(), ErrorCode::io);
    EXPECT_EQ(error.peers().at(3).code(), ErrorCode::corrupt);
  }
}

TEST(Agree, AnAgreementInsideNamesTheRanksThatFailed) {
  const auto seen = outcomes(3, [](Group& group) {
    agree(group, "inner", [&] {
      if (group.rank() == 1) throw Error(ErrorCode::io, "disk");
    });
  });
  ASSERT_EQ(seen.size(), 3U);
  ASSERT_EQ(seen.at(0).peers().size(), 1U);
  EXPECT_EQ(seen.at(0).peers().at(1).message(), "disk");
}

TEST(Agree, AloneTheErrorKeepsItsCode) {
  const auto group = solo_group();
  try {
    agree(*group, "op", [] { throw Error(ErrorCode::unsafe, "x"); });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::unsafe);
    EXPECT_EQ(error.peers().at(0).code(), ErrorCode::unsafe);
  }
}

// Issue 15, 6.3.
TEST(Agree, ACodeThatAllFailuresShareIsKept) {
  const auto seen =
      outcomes(3, [](Group&) { throw Error(ErrorCode::not_found, "none").at_path("p"); });
  ASSERT_EQ(seen.size(), 3U);
  for (const auto& [rank, error] : seen) {
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_EQ(error.path(), "p");
    EXPECT_EQ(error.peers().size(), 3U);
  }
}

TEST(Agree, WhatARankAgreedOnAloneIsItsOwnFailure) {
  const auto seen = outcomes(3, [](Group& group) {
    const auto alone = solo_group();
    if (group.rank() == 2)
      agree(*alone, "inner", [] { throw Error(ErrorCode::io, "disk").at_path("p"); });
  });
  ASSERT_EQ(seen.size(), 3U);
  ASSERT_EQ(seen.at(0).peers().size(), 1U);
  EXPECT_EQ(seen.at(0).peers().at(2).path(), "p");
}

TEST(Agree, WhenPeersAreGoneTheLocalFailureIsTold) {
  try {
    run_ranks(2, [](Group& group) {
      if (group.rank() == 1) return;
      agree(group, "op", [] { throw Error(ErrorCode::corrupt, "mine"); });
    });
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::corrupt);
  }
}

}  // namespace
}  // namespace tessera
