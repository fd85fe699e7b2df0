#include "comm/whereabouts.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(Whereabouts, TravelBesideTheNameAndAreNotCompared) {
  const auto plain = called_here("gather of 3 Float");
  EXPECT_EQ(plain, "gather of 3 Float");
  set_whereabouts("the forward of step 4");
  const auto called = called_here("gather of 3 Float");
  set_whereabouts("");
  EXPECT_EQ(compared_part(called), plain);
  EXPECT_EQ(to_sentence(called), "gather of 3 Float (the forward of step 4)");
  EXPECT_EQ(to_sentence(plain), plain);
}

TEST(Whereabouts, PurposesAreComparedWithTheName) {
  {
    const Purpose outer("saving a checkpoint");
    EXPECT_EQ(called_here("all_gather"), "all_gather for saving a checkpoint");
    const Purpose inner("a barrier");
    set_whereabouts("after the backward of step 2");
    const auto called = called_here("all_gather");
    set_whereabouts("");
    EXPECT_EQ(compared_part(called), "all_gather for a barrier in saving a checkpoint");
    EXPECT_EQ(to_sentence(called),
              "all_gather for a barrier in saving a checkpoint (after the backward of step 2)");
  }
  EXPECT_EQ(called_here("all_gather"), "all_gather");
}

TEST(Whereabouts, LongNamesAreCutAndStillTellWhere) {
  const std::string name(1000, 'n');
  set_whereabouts("the forward of step 4, " + std::string(1000, 'w'));
  const auto called = called_here(name);
  set_whereabouts("");
  EXPECT_EQ(compared_part(called), name.substr(0, kComparedBytes));
  EXPECT_EQ(called.size(), kCalledBytes);
  EXPECT_THAT(to_sentence(called), HasSubstr("(the forward of step 4, w"));
}

TEST(Whereabouts, DifferentCallsNameBothRanksAndInTrainingTheLikelyCause) {
  const Error outside = different_calls(0, "barrier", 1, "gather of 3 Float");
  EXPECT_EQ(outside.code(), ErrorCode::mismatch);
  EXPECT_EQ(outside.message(), "rank 0 called barrier, rank 1 called gather of 3 Float");
  const Error inside = different_calls(1, "barrier\nafter the backward of step 2", 3, "reduction");
  EXPECT_THAT(inside.message(),
              HasSubstr("rank 1 called barrier (after the backward of step 2), rank 3 called "
                        "reduction: not every rank"));
}

}  // namespace
}  // namespace tessera
