// AWS Signature Version 4, of headers.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "storage/http/client.h"
#include "storage/s3/credentials.h"

namespace tessera::s3 {

inline constexpr std::string_view kUnsignedPayload = "UNSIGNED-PAYLOAD";

struct SigningScope {
  std::string region;
  std::string service = "s3";
  std::chrono::system_clock::time_point now;
};

// Adds host, x-amz-date, x-amz-security-token and authorization, and for s3 x-amz-content-sha256,
// to the headers of `request`, whose URL is percent-encoded once as by percent_encoded(). Its query
// may have any order; all headers are signed. `payload_hash`: of the body in hexadecimal digits, or
// kUnsignedPayload.
void sign(HttpRequest& request, const Credentials& credentials, const SigningScope& scope,
          std::string_view payload_hash);

[[nodiscard]] std::string sha256_hex(ByteView bytes);

}  // namespace tessera::s3
