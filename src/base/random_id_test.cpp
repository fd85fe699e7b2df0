#include "base/random_id.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

namespace tessera {
namespace {

TEST(RandomId, HasTheStatedForm) {
  EXPECT_THAT(random_attempt(), testing::MatchesRegex("[0-9a-f]+"));
  EXPECT_EQ(random_attempt().size(), 12U);
  const std::string uuid = random_uuid();
  ASSERT_EQ(uuid.size(), 36U);
  EXPECT_THAT(uuid,
              testing::MatchesRegex("[0-9a-f]+-[0-9a-f]+-4[0-9a-f]+-[89ab][0-9a-f]+-[0-9a-f]+"));
  EXPECT_EQ(uuid[8], '-');
  EXPECT_EQ(uuid[23], '-');
}

TEST(RandomId, DoesNotRepeat) {
  std::set<std::string> seen;
  for (int i = 0; i < 1000; ++i) seen.insert(random_attempt());
  for (int i = 0; i < 1000; ++i) seen.insert(random_uuid());
  EXPECT_EQ(seen.size(), 2000U);
}

}  // namespace
}  // namespace tessera
