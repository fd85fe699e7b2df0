// Bytes at rest: sources that are read at an offset, sinks that are written at an offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace tessera {

using ByteView = std::span<const std::byte>;
using MutableByteView = std::span<std::byte>;

// Bytes of an object and where they go.
struct ReadRange {
  std::uint64_t offset = 0;
  MutableByteView out;
};

// An immutable object of known size. All members may be called from several threads at once.
class ByteSource {
 public:
  virtual ~ByteSource() = default;
  [[nodiscard]] virtual std::uint64_t size() const = 0;
  // Fills `out` from `offset`. Throws `incomplete` when the object ends before, `conflict` when it
  // was changed since it was opened and the store can tell, `io` when the store refuses; then the
  // content of `out` is unspecified.
  virtual void read_at(std::uint64_t offset, MutableByteView out) const = 0;
  // The same for several ranges, for the price of one where a request has a price of its own.
  virtual void read_ranges(std::span<const ReadRange> ranges) const {
    for (const ReadRange& range : ranges) read_at(range.offset, range.out);
  }
  // What to call it in an Error.
  [[nodiscard]] virtual const std::string& name() const = 0;
  // Whether read_at compares what it gives with digests recorded for it: a difference is `corrupt`.
  [[nodiscard]] virtual bool checked() const { return false; }
};

// A new object under construction. `write_at` may be called from several threads for ranges that do
// not overlap. Nothing is visible under the object's name before `commit` has returned. Destroyed
// without commit, it leaves nothing behind.
class ByteSink {
 public:
  virtual ~ByteSink() = default;
  virtual void write_at(std::uint64_t offset, ByteView bytes) = 0;
  // `bytes` are at `offset` already, left there by a writer that was interrupted: counts as if they
  // were written. A sink that begins empty writes them.
  virtual void keep_at(std::uint64_t offset, ByteView bytes) { write_at(offset, bytes); }
  // Makes all bytes durable and then the object visible, in one step. At most once; no write after
  // it.
  virtual void commit() = 0;
  [[nodiscard]] virtual const std::string& name() const = 0;
};

// `offset` .. `offset + size` of `source` as a source of its own; shares ownership.
// Throws `incomplete` when the source is shorter.
[[nodiscard]] std::shared_ptr<ByteSource> slice_source(std::shared_ptr<const ByteSource> source,
                                                       std::uint64_t offset, std::uint64_t size);
// Bytes that live in memory; takes them over.
[[nodiscard]] std::shared_ptr<ByteSource> memory_source(std::vector<std::byte> bytes,
                                                        std::string name);
// Keeps what is written in memory and gives it to `commit`, which makes the object visible: what a
// store of one's own needs where objects are written whole. Bytes that nobody wrote are 0.
[[nodiscard]] std::unique_ptr<ByteSink> memory_sink(
    std::string name, std::function<void(std::vector<std::byte> bytes)> commit);
// The whole of a small object. Throws `limit` when it is larger than `cap`.
[[nodiscard]] std::vector<std::byte> read_all(const ByteSource& source, std::uint64_t cap);

}  // namespace tessera
