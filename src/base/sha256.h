// SHA-256 of small texts, for names that nobody can make two of, or read back. What is signed for
// a server is hashed by libcrypto (storage/s3), which is quick, but is not on every machine.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

inline constexpr std::size_t kSha256Digits = 64;
[[nodiscard]] std::string sha256_text(std::string_view text);  // lower-case hex digits

}  // namespace tessera
