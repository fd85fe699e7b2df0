#include "base/digest.h"

#include <fmt/format.h>
#include <xxhash.h>

namespace tessera {

std::string digest_hex(std::span<const std::byte> bytes) {
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  return fmt::format("{:016x}{:016x}", hash.high64, hash.low64);
}

}  // namespace tessera
