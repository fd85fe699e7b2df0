// What every DeviceMemory must do. An implementation instantiates the suite with a function that
// makes a memory with given bytes, and with one that reads the bytes back without it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <vector>

#include "tessera/io.h"

namespace tessera {

struct DeviceSubject {
  std::shared_ptr<DeviceMemory> memory;
  std::function<std::vector<std::byte>()> bytes;  // of the memory, as they are now
};
using MakeDevice = std::function<DeviceSubject(const std::vector<std::byte>& bytes)>;

class DeviceConformance : public ::testing::TestWithParam<MakeDevice> {
 protected:
  static std::vector<std::byte> counted(std::size_t size) {
    std::vector<std::byte> bytes(size);
    for (std::size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
    return bytes;
  }
  static std::vector<std::byte> copied(ByteView bytes) { return {bytes.begin(), bytes.end()}; }
};

TEST_P(DeviceConformance, CopiesRangesBothWays) {
  std::vector<std::byte> bytes = counted(5000);
  const DeviceSubject made = GetParam()(bytes);
  DeviceMemory& memory = *made.memory;
  EXPECT_EQ(memory.size(), 5000U);
  EXPECT_FALSE(memory.device().empty());
  const HostWindow window = memory.window(300);
  ASSERT_GE(window.bytes.size(), 300U);
  const std::vector<ReadRange> out = {{4990, window.bytes.first(10)},
                                      {0, window.bytes.subspan(10, 90)},
                                      {17, window.bytes.subspan(100, 200)}};
  memory.copy_out(out)->wait();
  for (const ReadRange& range : out) {
    EXPECT_EQ(copied(range.out), copied(ByteView(bytes).subspan(range.offset, range.out.size())));
  }
  std::ranges::reverse(window.bytes.first(300));
  const std::vector<WriteRange> in = {{1, window.bytes.first(100)},
                                      {4800, window.bytes.subspan(100, 200)}};
  memory.copy_in(in)->wait();
  for (const WriteRange& range : in)
    std::ranges::copy(range.bytes, bytes.begin() + static_cast<std::ptrdiff_t>(range.offset));
  EXPECT_EQ(made.bytes(), bytes);
}

TEST_P(DeviceConformance, SeveralCopiesMayBeUnderWay) {
  const std::vector<std::byte> bytes = counted(1 << 20);
  const DeviceSubject made = GetParam()(bytes);
  constexpr std::size_t kPart = 1 << 18;
  std::vector<HostWindow> windows;
  std::vector<std::unique_ptr<DeviceCopy>> copies;
  for (std::size_t at = 0; at < bytes.size(); at += kPart) {
    windows.push_back(made.memory->window(kPart));
    const ReadRange range{at, windows.back().bytes.first(kPart)};
    copies.push_back(made.memory->copy_out({&range, 1}));
  }
  copies.pop_back();  // the last one is ended without a wait
  for (std::size_t i = copies.size(); i-- > 0;) {
    copies[i]->wait();
    EXPECT_EQ(copied(windows[i].bytes.first(kPart)),
              copied(ByteView(bytes).subspan(i * kPart, kPart)));
  }
}

TEST_P(DeviceConformance, NothingIsAMemoryToo) {
  const DeviceSubject made = GetParam()({});
  EXPECT_EQ(made.memory->size(), 0U);
  made.memory->copy_out({})->wait();
  made.memory->copy_in({})->wait();
  EXPECT_TRUE(made.bytes().empty());
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceConformance);

}  // namespace tessera
