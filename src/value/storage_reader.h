// The plain bytes of a Storage, wherever they are and however torch left them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "tessera/io.h"
#include "tessera/value.h"

namespace tessera {

// torch's lazy bits of tensors, resolved.

// Makes `count` elements as `piece`'s storage holds them, of type `dtype` and one behind the other,
// those that the piece stands for: conjugates, negatives, or both. Without a bit nothing happens.
// Twice gives the first elements again. Throws `unsupported` for negatives of types that torch
// cannot negate.
void resolve_bits(const Piece& piece, DType dtype, std::byte* elements, std::int64_t count);

// Bytes of a device through two host windows: while one's bytes are used, the other's are copied.

// Reads. Belongs to one thread. All members throw `io` as DeviceCopy::wait does.
class DeviceReader {
 public:
  // `begin`, `end`: bytes that will probably be read from front to back.
  DeviceReader(std::shared_ptr<DeviceMemory> memory, std::uint64_t begin, std::uint64_t end)
      : memory_(std::move(memory)), expected_(begin), end_(end) {}

  // `size` bytes from `at` on, until the next call of any member. If the last call ended at `at`,
  // as many bytes behind them are on their way when it returns.
  ByteView view(std::uint64_t at, std::size_t size);
  void read(std::uint64_t at, MutableByteView out);
  void read_ranges(std::span<const ReadRange> ranges);

 private:
  // The window outlives the copy into it.
  struct Buffer {
    HostWindow window = {};
    std::uint64_t at = 0;  // what `copy` brings, for view()
    std::size_t size = 0;
    std::vector<ReadRange> parts = {};  // what it brings, one behind the other, for read_ranges()
    std::unique_ptr<DeviceCopy> copy = nullptr;
  };
  void start(Buffer& buffer, std::uint64_t at, std::size_t size);
  void start_parts(Buffer& buffer, std::span<const ReadRange>& ranges, std::size_t& done);
  static void finish_parts(Buffer& buffer);

  std::shared_ptr<DeviceMemory> memory_;
  std::uint64_t expected_;  // where the next call will probably begin
  std::uint64_t end_;
  std::array<Buffer, 2> buffers_ = {};
  std::size_t next_ = 0;  // the buffer that the next view is in
};

// Writes. Belongs to one thread. All members throw `io` for what one of the copies before met.
class DeviceWriter {
 public:
  explicit DeviceWriter(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}

  // Room for `size` bytes, until the next call of any member.
  MutableByteView room(std::size_t size);
  // Starts to copy the first `size` bytes of the room to byte `at`.
  void send(std::uint64_t at, std::size_t size);
  // Writes bytes from anywhere, which may be changed afterwards.
  void write_ranges(std::span<const WriteRange> ranges);
  // Waits for all copies. What was written is there only after it has returned.
  void finish();

 private:
  struct Buffer {
    HostWindow window = {};
    std::unique_ptr<DeviceCopy> copy = nullptr;
  };

  std::shared_ptr<DeviceMemory> memory_;
  std::array<Buffer, 2> buffers_ = {};
  std::size_t next_ = 0;  // the buffer of the next room
};

// Plain bytes of a Storage, wherever they are.

// Whether the bytes are in the memory of the host or of a device, not in a source.
[[nodiscard]] bool is_in_memory(const Storage& storage);

// Belongs to one thread. The storage must outlive it. Throws `invalid_argument` for one whose bytes
// are nowhere, and otherwise what sources and devices throw.
class StorageReader {
 public:
  // `begin`, `end`: bytes of the storage that will probably be read from front to back.
  StorageReader(const Storage& storage, std::uint64_t begin, std::uint64_t end);
  explicit StorageReader(const Storage& storage) : StorageReader(storage, 0, storage.size) {}

  void read(std::uint64_t at, MutableByteView out);
  // The same bytes where they are, or else in `scratch`, until the next call.
  ByteView view(std::uint64_t at, MutableByteView scratch);

 private:
  const Storage& storage_;
  std::optional<DeviceReader> device_;  // none: they are elsewhere
};

}  // namespace tessera
