// Lets the tests of a program run on the test device: with TESSERA_TEST_DEVICE=1 rank r of a mesh
// computes on device r, and a race fails the test in which it was found.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "torch/test_device/test_device.h"
#include "torch/testing.h"

namespace tessera::testing {
namespace {

class Races final : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override { static_cast<void>(take_races()); }
  void OnTestEnd(const ::testing::TestInfo&) override {
    EXPECT_THAT(take_races(), ::testing::IsEmpty());
  }
};

const bool is_set = [] {
  const char* wanted = std::getenv("TESSERA_TEST_DEVICE");
  if (wanted == nullptr || std::string_view(wanted) != "1") return false;
  device_of_ranks() = [](int rank) { return test_device(rank % kTestDevices); };
  ::testing::UnitTest::GetInstance()->listeners().Append(new Races);
  return true;
}();

}  // namespace
}  // namespace tessera::testing
