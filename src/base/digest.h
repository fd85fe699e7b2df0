// Digests of blocks: XXH3 with 128 bits, as 32 lower-case hex digits.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace tessera {

[[nodiscard]] std::string digest_hex(std::span<const std::byte> bytes);

}  // namespace tessera
