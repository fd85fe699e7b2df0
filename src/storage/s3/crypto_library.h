// SHA-256 and HMAC by libcrypto, from the library of this machine.
#pragma once

#include <array>
#include <cstddef>
#include <string>
#include <string_view>

#include "tessera/io.h"

namespace tessera::s3 {

using Sha256 = std::array<std::byte, 32>;

// Each throws `unsupported` if there is no libcrypto.
[[nodiscard]] Sha256 sha256(ByteView bytes);
[[nodiscard]] Sha256 hmac_sha256(ByteView key, std::string_view text);
[[nodiscard]] std::string hex(const Sha256& digest);

}  // namespace tessera::s3
