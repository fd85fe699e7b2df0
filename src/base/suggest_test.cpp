#include "base/suggest.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

const std::vector<std::string> kNames = {"model.head.weight", "model.head.bias", "step", "lr"};

TEST(Suggest, FindsTheNearestName) {
  EXPECT_EQ(nearest("model.haed.weight", kNames), "model.head.weight");
  EXPECT_EQ(nearest("model.head.bia", kNames), "model.head.bias");
  EXPECT_EQ(nearest("sstep", kNames), "step");
}

TEST(Suggest, NothingThatIsFar) {
  EXPECT_EQ(nearest("model", kNames), "");
  EXPECT_EQ(nearest("xy", kNames), "");
  EXPECT_EQ(nearest(std::string(300, 'x'), {std::string(300, 'x')}), "");
  EXPECT_EQ(nearest(std::string(256, 'x'), {std::string(255, 'x')}), std::string(255, 'x'));
}

}  // namespace
}  // namespace tessera
