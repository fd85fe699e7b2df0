#include "tessera/error.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(Error, TheLineNamesEverythingThatIsKnown) {
  Error error(ErrorCode::corrupt, "found 3, expected 4");
  EXPECT_STREQ(error.what(), "corrupt: found 3, expected 4");
  error.at_path("a/b").at_key("w").at_offset(7).while_doing("loading");
  EXPECT_STREQ(error.what(), "corrupt: found 3, expected 4 [a/b, key 'w', offset 7] (loading)");
}

TEST(Error, TheInnermostPlaceIsKept) {
  Error error(ErrorCode::io, "x");
  error.at_path("inner").at_path("outer").at_offset(1).at_offset(2).at_key("k").at_key("l");
  EXPECT_EQ(error.path(), "inner");
  EXPECT_EQ(error.offset(), 1U);
  EXPECT_EQ(error.key(), "k");
}

// A name that a file gave; what() would end there.
TEST(Error, ANulCutsNothing) {
  const std::string name("a\0b", 3);
  const Error error = Error(ErrorCode::corrupt, "found " + name).at_key(name);
  EXPECT_STREQ(error.what(), R"(corrupt: found a\x00b [key 'a\x00b'])");
  EXPECT_EQ(error.key(), name);
}

TEST(Error, OffsetZeroIsAnOffset) {
  EXPECT_STREQ(Error(ErrorCode::io, "x").at_offset(0).what(), "io: x [offset 0]");
}

TEST(Error, EveryCodeHasAName) {
  EXPECT_EQ(to_string(ErrorCode::invalid_argument), "invalid_argument");
  EXPECT_EQ(to_string(ErrorCode::out_of_space), "out_of_space");
  EXPECT_EQ(to_string(ErrorCode::mismatch), "mismatch");
}

// P-03: one failing rank keeps its code, several become peer_failed; the map names each.
TEST(Error, PeersKeepTheirFailures) {
  EXPECT_TRUE(Error(ErrorCode::io, "x").peers().empty());
  const Error one = Error::from_peers({{3, Error(ErrorCode::out_of_space, "full")}}, 4);
  EXPECT_EQ(one.code(), ErrorCode::out_of_space);
  EXPECT_EQ(one.peers().at(3).message(), "full");
  const Error two = Error::from_peers(
      {{0, Error(ErrorCode::io, "a")}, {2, Error(ErrorCode::corrupt, "b").at_path("p")}}, 3);
  EXPECT_EQ(two.code(), ErrorCode::peer_failed);
  EXPECT_STREQ(two.what(), "peer_failed: rank 0: io: a; rank 2: corrupt: b [p]");
}

TEST(Error, ACauseThatRanksShareIsSaidOnce) {
  const Error same(ErrorCode::not_found, "gone");
  const Error all = Error::from_peers({{0, same}, {1, Error(ErrorCode::io, "x")}, {2, same}}, 3);
  EXPECT_STREQ(all.what(), "peer_failed: rank 0, 2: not_found: gone; rank 1: io: x");
  EXPECT_EQ(all.peers().size(), 3U);
}

// Issue 15, 6.3: "start afresh when there is none" can be written.
TEST(Error, WhatAllFailuresShareIsKept) {
  const auto missing = [](const char* key) {
    return Error(ErrorCode::not_found, "gone").at_path("p").at_key(key);
  };
  const Error all = Error::from_peers({{0, missing("a")}, {1, missing("b")}}, 2);
  EXPECT_EQ(all.code(), ErrorCode::not_found);
  EXPECT_EQ(all.path(), "p");
  EXPECT_EQ(all.key(), "");
  EXPECT_STREQ(
      all.what(),
      "not_found: rank 0: not_found: gone [p, key 'a']; rank 1: not_found: gone [p, key 'b']");
  EXPECT_EQ(Error::from_peers({{0, missing("a")}, {1, missing("a")}}, 2).key(), "a");
}

// Issue 15, 7.5.
TEST(Error, OfOneRankIsItsOwn) {
  Error error = Error::from_peers(
      {{0, Error(ErrorCode::corrupt, "bad").at_path("p").at_key("k").at_offset(3)}}, 1);
  EXPECT_EQ(error.path(), "p");
  EXPECT_EQ(error.key(), "k");
  EXPECT_EQ(error.offset(), 3U);
  EXPECT_STREQ(error.while_doing("reading").what(),
               "corrupt: bad [p, key 'k', offset 3] (reading)");
  EXPECT_EQ(error.peers().at(0).key(), "k");
}

TEST(Error, APlaceThatIsAddedToFailuresOfRanksIsTold) {
  Error error = Error::from_peers({{1, Error(ErrorCode::io, "x")}}, 2);
  EXPECT_STREQ(error.at_path("p").what(), "io: rank 1: io: x [p]");
}

}  // namespace
}  // namespace tessera
