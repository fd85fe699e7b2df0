// Sources of credentials. No error has more of an answer than its status and code, since answers
// are secrets.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "storage/s3/credentials.h"

namespace tessera::s3 {

// The credentials of `profile` or, if it is empty, of the first in the order of CredentialSource
// that has some.
[[nodiscard]] Credentials find_credentials(const std::string& profile, HttpClient& client);

// What `command`, a line of words with quotes and without a shell, prints: JSON of version 1. It
// reads nothing, what it says to stderr is lost, and after `within` or 1 MiB it is killed. Throws
// `io`, and `invalid_argument` for a quote that is not closed.
[[nodiscard]] Credentials of_process(const std::string& command,
                                     std::chrono::milliseconds within = std::chrono::minutes(1));

struct Role {
  std::string arn;
  std::string session = {};      // its name in the logs of AWS; empty: "tessera"
  std::string external_id = {};  // empty: none
  std::string seconds = {};      // how long the credentials hold; empty: the service decides
  std::string region = {};       // of the token service; empty: the global one
};
// From the token service, AWS_ENDPOINT_URL_STS or AWS's: by the token in a file, and by other
// credentials. Throw `io`, and `invalid_argument` where there is no ARN.
[[nodiscard]] Credentials of_web_identity(const std::string& token_file, const Role& role,
                                          HttpClient& client);
[[nodiscard]] Credentials of_role(const Role& role, const Credentials& own, HttpClient& client);

// The credentials that AWS_CONTAINER_CREDENTIALS_RELATIVE_URI or _FULL_URI leads to; none: neither
// is set. Throws `unsafe` for plain http to another machine.
[[nodiscard]] std::optional<Credentials> of_container();
// The credentials of the machine, by metadata v2; none: there is no such service, or it has no
// role.
[[nodiscard]] std::optional<Credentials> of_instance();

}  // namespace tessera::s3
