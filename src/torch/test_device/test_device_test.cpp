// The device of the tests finds what it is for: each test plants one fault, or shows an order that
// is none.
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "torch/test_device/device_mesh.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::take_races;
using testing::test_device;

class TestDevice : public ::testing::Test {
 protected:
  void SetUp() override {
    static_cast<void>(take_races());
    static_cast<void>(testing::take_counts(0));
  }
  static c10::Stream compute() { return impl().getStream(test_device(0)); }
  static c10::impl::VirtualGuardImpl impl() {
    return c10::impl::VirtualGuardImpl(at::kPrivateUse1);
  }
  // `to` waits for what `from` has begun.
  static void order(const c10::Stream& from, const c10::Stream& to) {
    c10::Event event(at::kPrivateUse1);
    event.record(from);
    event.block(to);
  }
  c10::Stream side = impl().getStreamFromGlobalPool(test_device(0));
  at::Tensor x = at::zeros({8}, at::TensorOptions(test_device(0)));
};

TEST_F(TestDevice, WorkOfOneStreamIsOrdered) {
  x.add_(1);
  x.mul_(2);
  EXPECT_THAT(take_races(), IsEmpty());
}

TEST_F(TestDevice, EventsThatAStreamWaitsForAreCounted) {
  order(compute(), side);
  order(side, compute());
  order(compute(), side);
  const std::map<c10::StreamId, int> expected{{0, 1}, {side.id(), 2}};
  EXPECT_EQ(testing::take_counts(0).stream_waits, expected);
}

TEST_F(TestDevice, AReadBesideAWriteIsARace) {
  x.add_(1);
  {
    const c10::StreamGuard guard(side);
    static_cast<void>(x.sum());
  }
  EXPECT_THAT(take_races(), ::testing::Contains(HasSubstr("may run beside")));
}

// Its stream may have had it for something else.
TEST_F(TestDevice, FreshMemoryOnAnotherStreamIsARace) {
  const auto fresh = at::empty({8}, x.options());
  {
    const c10::StreamGuard guard(side);
    fresh.zero_();
  }
  EXPECT_THAT(take_races(), ::testing::Contains(HasSubstr("may run beside what had the memory")));
}

TEST_F(TestDevice, AWriteBesideAReadIsARace) {
  order(compute(), side);
  {
    const c10::StreamGuard guard(side);
    static_cast<void>(x.sum());
  }
  EXPECT_THAT(take_races(), IsEmpty());
  x.add_(1);
  EXPECT_THAT(take_races(), ::testing::Contains(HasSubstr("add may run beside sum")));
}

TEST_F(TestDevice, TwoReadsAndOtherBytesAreNone) {
  order(compute(), side);
  {
    const c10::StreamGuard guard(side);
    static_cast<void>(x.sum());
    x.narrow(0, 4, 4).add_(1);
  }
  static_cast<void>(x.narrow(0, 0, 4).sum());
  x.narrow(0, 0, 2);
  EXPECT_THAT(take_races(), IsEmpty());
  order(side, compute());
  x.add_(1);
  EXPECT_THAT(take_races(), IsEmpty());
}

TEST_F(TestDevice, AnEventOrdersWhatCameBeforeItAlone) {
  c10::Event early(at::kPrivateUse1);
  early.record(compute());
  x.add_(1);
  early.block(side);
  const c10::StreamGuard guard(side);
  static_cast<void>(x.sum());
  EXPECT_THAT(take_races(), ::testing::Not(IsEmpty()));
}

TEST_F(TestDevice, AHostThatHasWaitedOrdersToo) {
  x.add_(1);
  compute().synchronize();
  const c10::StreamGuard guard(side);
  static_cast<void>(x.sum());
  EXPECT_THAT(take_races(), IsEmpty());
}

TEST_F(TestDevice, MemoryThatIsFreedEarlyIsARace) {
  order(compute(), side);
  {
    const c10::StreamGuard guard(side);
    static_cast<void>(x.sum());
  }
  x = at::Tensor();
  EXPECT_THAT(take_races(), ElementsAre(HasSubstr("the memory was freed")));
}

TEST_F(TestDevice, MemoryMayBeFreedWhenItsStreamHasWaited) {
  order(compute(), side);
  {
    const c10::StreamGuard guard(side);
    static_cast<void>(x.sum());
  }
  order(side, compute());
  x = at::Tensor();
  EXPECT_THAT(take_races(), IsEmpty());
}

TEST_F(TestDevice, WhatIsCopiedOutIsThereOnlyAfterAWait) {
  const auto pinned = at::zeros({8}, at::TensorOptions().pinned_memory(true));
  x.fill_(3);
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_NE(pinned[0].item<float>(), 3);
  c10::Event event(at::kPrivateUse1);
  event.record(compute());
  event.synchronize();
  EXPECT_EQ(pinned[0].item<float>(), 3);
  EXPECT_THAT(testing::take_counts(0).pageable, IsEmpty());
}

TEST_F(TestDevice, WhatIsCopiedInMayNotChangeBefore) {
  const auto pinned = at::zeros({8}, at::TensorOptions().pinned_memory(true));
  x.copy_(pinned, /*non_blocking=*/true);
  pinned.fill_(1);
  compute().synchronize();
  EXPECT_THAT(take_races(), ElementsAre(HasSubstr("the host changed")));
}

TEST_F(TestDevice, WaitsAndPageableCopiesAreCounted) {
  x.copy_(at::ones({8}), /*non_blocking=*/true);
  auto counts = testing::take_counts(0);
  EXPECT_EQ(counts.pageable.size(), 1u);
  EXPECT_EQ(counts.waits.size(), 1u);
  static_cast<void>(x.sum().item<float>());
  counts = testing::take_counts(0);
  EXPECT_EQ(counts.waits.size(), 1u);
  EXPECT_EQ(counts.launches["sum"], 1);
  const testing::Uncounted uncounted;
  static_cast<void>(x.sum().item<float>());
  EXPECT_EQ(testing::take_counts(0).all_launches(), 0);
}

TEST_F(TestDevice, TensorsOfTheCpuAmongThoseOfTheDeviceAreRefused) {
  EXPECT_THROW(static_cast<void>(x + at::ones({8})), c10::Error);
  EXPECT_THROW(at::_foreach_add_({x}, {at::ones({8})}), c10::Error);
  EXPECT_NO_THROW(static_cast<void>(x + at::ones({})));
}

// A collective whose end nobody waits for.
TEST_F(TestDevice, AWaitThatIsLeftOutOfACollectiveIsFound) {
  for (const bool waits : {true, false}) {
    testing::run_device_mesh(2, [&](Mesh& mesh) {
      auto ones = at::ones({4}, at::TensorOptions(mesh.device()));
      std::vector<at::Tensor> tensors{ones};
      const auto work = mesh.process_group()->allreduce(tensors);
      if (waits) work->wait();
      EXPECT_EQ(ones.sum().cpu().item<float>(), 8);
      work->wait();
    });
    EXPECT_EQ(take_races().empty(), waits);
  }
}

}  // namespace
}  // namespace tessera
