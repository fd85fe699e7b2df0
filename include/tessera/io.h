// Bytes at rest: sources that are read at an offset, sinks that are written at an offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] tessera {

using ByteView = std::span<const std::byte>;
using MutableByteView = std::span<std::byte>;

// Bytes of an object and where they go.
struct ReadRange {
  std::uint64_t offset = 0;
  MutableByteView out;
};

inline constexpr std::uint64_t kNearRequest = 4U << 10U;  // of memory and local disks

// An immutable object of known size. All members may be called from several threads at once.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  // Fills `out` from `offset` on. Throws `incomplete` if the object ends too early, `conflict` if
  // it has changed since it was opened and the store can tell, and `io` if the store refuses. After
  // that the content of `out` is unspecified.
  virtual void read_at(std::uint64_t offset, MutableByteView out) const = 0;
  // The same for several ranges. Where each request has a price, all of them cost one.
  virtual void read_ranges(std::span<const ReadRange> ranges) const {
    for (const ReadRange& range : ranges) read_at(range.offset, range.out);
  }
  // How an Error names the object.
  [[nodiscard]] virtual const std::string& name() const = 0;
  // Tells these bytes from others that had this name, or get it. Empty: the store cannot tell.
  [[nodiscard]] virtual std::string version() const { return {}; }
  // Tells these bytes from all others that any process, at any time, finds anywhere: what a cache
  // may know them by. It holds the whole address, and so may hold secrets: never show it. Empty:
  // the store cannot promise that much.
  [[nodiscard]] virtual std::string identity() const { return {}; }
  // How many bytes one request costs as much as. Gaps that are shorter are better read over, and
  // reads of a hundred times as many use the store well.
  [[nodiscard]] virtual std::uint64_t request_cost() const { return kNearRequest; }
  // Whether read_at compares what it gives with digests recorded for it. A difference is `corrupt`.
  [[nodiscard]] virtual bool checked() const { return false; }
  // All bytes as memory that is changed alone: pages of a local file, each read when somebody first
  // looks at it. Null: the store has none. What is written there stays in this mapping, no file and
  // no other mapping sees it. Nothing of it is compared with digests. Throws `conflict` if the file
  // has changed since it was opened. Whether somebody cuts off or writes into the file later cannot
  // be told: a page behind its end is a SIGBUS. A file that is replaced or removed stays whole.
  [[nodiscard]] virtual std::shared_ptr<std::byte[]> map() const { return nullptr; }
  // The source itself or, if it is a cache or a check in front of another one with the same bytes,
  // original() of that one. It lives as long as this one.
  [[nodiscard]] virtual const ByteSource& original() const { return *this; }
};

// A new object under construction. Several threads may call `write_at` at once, for ranges that do
// not overlap. Nothing is visible under the object's name before `commit` has returned. A sink that
// is destroyed without a commit leaves nothing behind.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual void write_at(std::uint64_t offset, ByteView bytes) = 0;
  // Makes all bytes durable and then the object visible, in one step. Call it at most once, and
  // write nothing after it.
  virtual void commit() = 0;
  [[nodiscard]] virtual const std::string& name() const = 0;
};

// The bytes `offset` .. `offset + size` of `source` as a source of its own, which shares ownership.
// Throws `incomplete` if `source` is shorter.
[[nodiscard]] std::shared_ptr<ByteSource> slice_source(std::shared_ptr<const ByteSource> source,
                                                       std::uint64_t offset, std::uint64_t size);
// A source of bytes in memory, which it takes over.
[[nodiscard]] std::shared_ptr<ByteSource> memory_source(std::vector<std::byte> bytes,
                                                        std::string name);
// Keeps in memory what is written, and gives it to `commit`, which makes the object visible. A
// store of your own needs this if it writes objects whole. Bytes that nobody wrote are 0.
[[nodiscard]] std::unique_ptr<ByteSink> memory_sink(
    std::string name, std::function<void(std::vector<std::byte> bytes)> commit);
// Reads a small object whole. Throws `limit` if it is larger than `cap`.
[[nodiscard]] std::vector<std::byte> read_all(const ByteSource& source, std::uint64_t cap);

// Memory that the processor cannot read or write, such as a GPU's. Its bytes are copied to host
// memory and back. A Storage (value.h) may have such memory.

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
  // memory, or in what lock_pages() has locked, on the other; ranges that are written do not
  // overlap. The list itself is not used after the return. The copies see what work that was queued
  // on the device before has written, and work that is queued on the device after wait() sees what
  // they wrote. Throws `io` if the copies cannot be started.
  [[nodiscard]] virtual std::unique_ptr<DeviceCopy> copy_out(std::span<const ReadRange> ranges) = 0;
  [[nodiscard]] virtual std::unique_ptr<DeviceCopy> copy_in(std::span<const WriteRange> ranges) = 0;

  // Page-locks memory of the host, for copies of any memory of the device, until what it returns
  // goes. Null: the device has no use for that, or cannot.
  [[nodiscard]] virtual std::shared_ptr<void> lock_pages(MutableByteView /*host*/) { return {}; }
  // The same memory, whose copies see what was queued on the device before this call, and run
  // beside what is queued later: until they are complete nobody may write to it. Null: there is
  // none, and copies take their turn.
  [[nodiscard]] virtual std::shared_ptr<DeviceMemory> beside() { return {}; }
};

}  // namespace tessera
