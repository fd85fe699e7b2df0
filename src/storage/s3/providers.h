// Where credentials can come from beside variables and plain profiles.
#pragma once

#include <optional>
#include <string>

#include "storage/s3/credentials.h"
#include "storage/s3/profile_files.h"

namespace tessera::s3 {

// What `command`, a line of words with quotes and without a shell, prints: JSON of version 1.
[[nodiscard]] Credentials of_process(const std::string& command);
// By the token of a file, from the token service. `role`: its ARN.
[[nodiscard]] Credentials of_web_identity(const std::string& token_file, const std::string& role,
                                          HttpClient& client);
// Of AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI; none: neither is set.
[[nodiscard]] std::optional<Credentials> of_container();
// Of the machine, by metadata v2; none: there is no such service, or it has no role.
[[nodiscard]] std::optional<Credentials> of_instance();

// "2026-11-25T03:00:00Z". Throws `corrupt`.
[[nodiscard]] std::chrono::system_clock::time_point parse_time(const std::string& text);

}  // namespace tessera::s3
