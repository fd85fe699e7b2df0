// An Error as a message to other ranks.
#pragma once

#include <span>

#include "tessera/comm.h"

namespace tessera {

// Code, message, path, key, offset and the failures of peers.
[[nodiscard]] Bytes encode_error(const Error& error);
// Throws `corrupt` for bytes that encode_error did not make.
[[nodiscard]] Error decode_error(std::span<const std::byte> bytes);

}  // namespace tessera
