// SHA-256 and HMAC by libcrypto, from the library of this machine.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "storage/http/client.h"
#include "storage/s3/credentials.h"
#include "tessera/io.h"

namespace tessera::s3 {

using Sha256 = std::array<std::byte, 32>;

// Each throws `unsupported` if there is no libcrypto.
[[nodiscard]] Sha256 sha256(ByteView bytes);
[[nodiscard]] Sha256 hmac_sha256(ByteView key, std::string_view text);
[[nodiscard]] std::string hex(const Sha256& digest);

// AWS Signature Version 4, of headers, and GOOG4-HMAC-SHA256, which is that with other names.

inline constexpr std::string_view kUnsignedPayload = "UNSIGNED-PAYLOAD";

// Google has names of its own for the same rules, and refuses a request that has both kinds.
enum class Dialect : std::uint8_t { aws, google };

struct SigningScope {
  std::string region;
  std::string service = "s3";
  std::chrono::system_clock::time_point now;
  Dialect dialect = Dialect::aws;
};

// "x-amz-date", "x-goog-date".
[[nodiscard]] std::string vendor_header(Dialect dialect, std::string_view name);

// Adds host, authorization and the vendor's headers date and security-token, for s3 content-sha256,
// to the headers of `request`, whose URL is percent-encoded once as by percent_encoded(). Its query
// may have any order; all headers are signed. `payload_hash`: of the body in hexadecimal digits, or
// kUnsignedPayload.
void sign(HttpRequest& request, const Credentials& credentials, const SigningScope& scope,
          std::string_view payload_hash);

[[nodiscard]] std::string sha256_hex(ByteView bytes);

}  // namespace tessera::s3
