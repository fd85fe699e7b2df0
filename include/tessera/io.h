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
  // Of a source in front of another one with the same bytes, a cache or a check: that one, or what
  // it stands in front of. Lives as long as this one.
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

}  // namespace tessera
