#include "comm/confer.h"

#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>

#include <gtest/gtest.h>

#include "comm/message.h"
#include "tessera/comm.h"

namespace tessera {
namespace {

TEST(ErrorMessage, KeepsWhatTheErrorKnows) {
  const Error sent =
      Error(ErrorCode::out_of_space, "no room").at_path("a/b").at_key("w").at_offset(0);
  const Error got = decode_error(encode_error(sent));
  EXPECT_EQ(got.code(), ErrorCode::out_of_space);
  EXPECT_EQ(got.message(), "no room");
  EXPECT_EQ(got.path(), "a/b");
  EXPECT_EQ(got.key(), "w");
  EXPECT_EQ(got.offset(), 0U);
  EXPECT_FALSE(decode_error(encode_error(Error(ErrorCode::io, ""))).offset());
  EXPECT_FALSE(got.is_no_checkpoint());
  const Error none = Error(ErrorCode::not_found, "none").as_no_checkpoint();
  EXPECT_TRUE(decode_error(encode_error(none)).is_no_checkpoint());
}

TEST(ErrorMessage, KeepsThePeers) {
  const Error sent = Error::from_peers({{1, Error(ErrorCode::io, "x").at_path("p")},
                                        {5, Error(ErrorCode::corrupt, "y").at_offset(3)}},
                                       6);
  const Error got = decode_error(encode_error(sent));
  EXPECT_STREQ(got.what(), sent.what());
  EXPECT_EQ(got.peers().at(5).offset(), 3U);
}

TEST(ErrorMessage, EveryCutIsRefused) {
  const Bytes whole =
      encode_error(Error::from_peers({{1, Error(ErrorCode::io, "text").at_path("path")}}, 2));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    EXPECT_THROW((void)decode_error(std::span(whole).first(size)), Error) << size;
  }
  Bytes longer = whole;
  longer.push_back({});
  EXPECT_THROW((void)decode_error(longer), Error);
  Bytes unknown = whole;
  unknown[0] = std::byte{200};
  EXPECT_THROW((void)decode_error(unknown), Error);
}

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

// Runs `work` under agree on `ranks` ranks and returns what each rank got: its error, or none.
std::map<int, Error> outcomes_of(int ranks, const std::function<void(Group&)>& work) {
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
  EXPECT_TRUE(outcomes_of(4, [](Group&) {}).empty());
}

// P-03: 4 ranks, one failing, all see it.
TEST(Agree, AllRanksSeeTheOneThatFailed) {
  const auto seen = outcomes_of(4, [](Group& group) {
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
  const auto seen = outcomes_of(4, [](Group& group) {
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
  const auto seen = outcomes_of(3, [](Group& group) {
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
      outcomes_of(3, [](Group&) { throw Error(ErrorCode::not_found, "none").at_path("p"); });
  ASSERT_EQ(seen.size(), 3U);
  for (const auto& [rank, error] : seen) {
    EXPECT_EQ(error.code(), ErrorCode::not_found);
    EXPECT_EQ(error.path(), "p");
    EXPECT_EQ(error.peers().size(), 3U);
  }
}

TEST(Agree, WhatARankAgreedOnAloneIsItsOwnFailure) {
  const auto seen = outcomes_of(3, [](Group& group) {
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
