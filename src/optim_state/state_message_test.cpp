#include "optim_state/state_message.h"

#include <cstring>

#include <gtest/gtest.h>

#include "conformance/fake_device.h"
#include "tessera/error.h"

namespace tessera::detail {
namespace {

// A number of steps may be on the device, like the parameter that it belongs to.
TEST(StateMessage, ValuesOnADeviceTravelLikeThoseOfTheHost) {
  FakeDevice device;
  float numbers[] = {3, 7};
  Tensor step;
  step.pieces.push_back({whole({}), std::make_shared<Storage>(), 1, {}, -1});
  Storage& storage = *step.pieces[0].storage;
  storage.size = sizeof numbers;
  storage.device = std::make_shared<FakeMemory>(
      device, MutableByteView(reinterpret_cast<std::byte*>(numbers), sizeof numbers));
  const auto back = unpack_tree(pack_tree(Value::dict({{"step", step}})));
  float found = 0;
  std::memcpy(&found, back.at("step").as_tensor().pieces.at(0).storage->data, sizeof found);
  EXPECT_EQ(found, 7);
  EXPECT_EQ(device.window_bytes(), 0U);
}

}  // namespace
}  // namespace tessera::detail
