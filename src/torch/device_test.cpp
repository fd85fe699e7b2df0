#include "torch/device.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "conformance/errors.h"
#include "torch/testing.h"

namespace tessera {

// Ranks that share a device are told so when their mesh is made.

namespace {

using ::testing::HasSubstr;

TEST(OwnDevices, RanksThatShareOneAreNamed) {
  // Processes that see one device each call it cuda:0, containers have names of their own.
  const RankDevice first{"cuda:0", "a", "boot 1", "0:1:0"},
      second{"cuda:0", "b", "boot 1", "0:2:0"}, elsewhere{"cuda:0", "a", "boot 2", "0:1:0"};
  EXPECT_NO_THROW(require_own_devices({}));
  EXPECT_NO_THROW(require_own_devices({first, second, elsewhere}));
  // What two processes call differently may be one device.
  const RankDevice same{"cuda:3", "a", "boot 1", "0:1:0"};
  const auto two = error_of([&] { require_own_devices({second, first, elsewhere, same}); });
  EXPECT_EQ(two.code(), ErrorCode::invalid_argument);
  EXPECT_THAT(two.message(), HasSubstr("ranks 1 and 3 share a device, cuda:0 of host a: "));
  EXPECT_THAT(two.message(), HasSubstr("TESSERA_CUDA_BACKEND=gloo"));
  const auto three = error_of([&] { require_own_devices({first, same, elsewhere, first}); });
  EXPECT_THAT(three.message(), HasSubstr("ranks 0, 1 and 3 share a device"));
}

TEST(OwnDevices, EachRankHearsOfAllOthers) {
  testing::run_mesh(3, [](Mesh& mesh) {
    const torch::Device mine(torch::kMeta, static_cast<c10::DeviceIndex>(mesh.rank() / 2));
    const auto all = everyones_device(mesh.group(), mine);
    ASSERT_EQ(all.size(), 3U);
    EXPECT_EQ(all[2].name, "meta:1");
    EXPECT_EQ(all[0].host, all[2].host);
    EXPECT_FALSE(all[0].machine.empty());
    EXPECT_THAT(error_of([&] { require_own_devices(all); }).message(),
                HasSubstr("ranks 0 and 1 share a device, meta:0"));
  });
}

}  // namespace
}  // namespace tessera
