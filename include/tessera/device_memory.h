// Memory that the processor cannot read or write, such as a GPU's. Its bytes are copied to host
// memory and back. A Storage (value.h) may have such memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "tessera/io.h"

namespace [[gnu::visibility("default")]] tessera {

// Host memory that copies go to and come from. One thread uses it at a time.
struct HostWindow {
  MutableByteView bytes;
  std::shared_ptr<void> owner;  // keeps `bytes` alive
};

// Bytes in host memory, and where on the device they go.
struct WriteRange {
  std::uint64_t offset = 0;
  ByteView bytes;
};

// Copies that were started together. An object of this class belongs to one thread. The windows,
// and the memory on the device, must live until it is destroyed.
class DeviceCopy {
 public:
  // Returns only when the copies no longer touch a window. A failure that nobody waited for is
  // lost.
  virtual ~DeviceCopy() = default;
  // Returns when all copies are complete: only then the window has the bytes, or may be changed.
  // Throws `io` if one of them failed; then the content of what they write to is unspecified. Call
  // it at most once.
  virtual void wait() = 0;
};

// A range of a device's memory. Several threads may call all members at once, for the same bytes
// only if none of them writes.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  [[nodiscard]] virtual std::uint64_t size() const = 0;  // bytes
  // The device, as errors name it: "cuda:0". Memories of equal names share the addresses below.
  [[nodiscard]] virtual const std::string& device() const = 0;
  // The first byte's address on the device. Two tensors of one device whose addresses overlap share
  // memory. Nobody looks there.
  [[nodiscard]] virtual std::uintptr_t address() const = 0;

  // Host memory of `size` bytes that copies are fast with: page-locked, if the device can tell the
  // difference. Throws `limit` if there is none. Readers and writers ask for two windows of up to
  // 1 MiB for each tensor and each of their threads, so what is given back should be used again.
  [[nodiscard]] virtual HostWindow window(std::size_t size) = 0;

  // Starts to copy bytes of the device into a window, or a window's bytes to the device, and
  // returns without waiting. Every range lies in this memory on one side, and in windows of this
  // memory on the other; ranges that are written do not overlap. The list itself is not used after
  // the return. The copies see what work that was queued on the device before has written, and work
  // that is queued on the device after wait() sees what they wrote. Throws `io` if the copies
  // cannot be started.
  [[nodiscard]] virtual std::unique_ptr<DeviceCopy> copy_out(std::span<const ReadRange> ranges) = 0;
  [[nodiscard]] virtual std::unique_ptr<DeviceCopy> copy_in(std::span<const WriteRange> ranges) = 0;
};

}  // namespace tessera
