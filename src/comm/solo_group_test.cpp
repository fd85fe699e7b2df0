#include <gtest/gtest.h>

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

}  // namespace
}  // namespace tessera
