// What those say who give credentials. Errors name `from`, and repeat nothing of the answer.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "storage/s3/credentials.h"

namespace tessera::s3 {

// "2026-11-25T03:00:00Z", also with a fraction and with "+01:00"; times that the clock cannot have,
// as year 9999, are its last one. Throws `corrupt`.
[[nodiscard]] std::chrono::system_clock::time_point parse_time(const std::string& text);

// An object with AccessKeyId, SecretAccessKey, Expiration and `token`, which is what the session's
// token is called. The last two may be absent or null. Throws `io`.
[[nodiscard]] Credentials credentials_of_json(std::string_view text, const char* token,
                                              const std::string& from);
// <ACTIONResponse><ACTIONResult><Credentials>. Throws `io`.
[[nodiscard]] Credentials credentials_of_xml(std::string_view text, const std::string& action,
                                             const std::string& from);

[[noreturn]] void refuse_credentials(const std::string& from, const std::string& why);

}  // namespace tessera::s3
