#include "base/crc32.h"

#include <libdeflate.h>
#include <zlib.h>

namespace tessera {

std::uint32_t crc32(std::span<const std::byte> bytes, std::uint32_t so_far) {
  return libdeflate_crc32(so_far, bytes.data(), bytes.size());
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_size) {
  return static_cast<std::uint32_t>(
      ::crc32_combine64(first, second, static_cast<z_off64_t>(second_size)));
}

}  // namespace tessera
