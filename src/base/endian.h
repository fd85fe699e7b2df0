// Little-endian numbers in byte buffers. The caller guarantees the room.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <vector>

namespace tessera {

static_assert(std::endian::native == std::endian::little, "Tessera runs on little-endian machines");

template <typename T>
requires std::is_trivially_copyable_v<T>
[[nodiscard]] T load_le(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
requires std::is_trivially_copyable_v<T>
void store_le(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

template <typename T>
requires std::is_trivially_copyable_v<T>
void append_le(std::vector<std::byte>& to, T value) {
  const auto* bytes = reinterpret_cast<const std::byte*>(&value);
  to.insert(to.end(), bytes, bytes + sizeof value);
}

}  // namespace tessera
