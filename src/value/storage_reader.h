// Plain bytes of a Storage, wherever they are.
#pragma once

#include <cstdint>
#include <optional>

#include "tessera/value.h"
#include "value/device_windows.h"

namespace tessera {

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
