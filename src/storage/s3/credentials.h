// Who we are to an S3 endpoint. Secrets are in no error, log or argument list.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "base/fork.h"
#include "storage/http/client.h"

namespace tessera::s3 {

struct Credentials {
  std::string key_id;
  std::string secret;
  std::string token = {};                                             // empty: none
  std::optional<std::chrono::system_clock::time_point> expires = {};  // none: never
};

// Finds credentials in the order of the AWS SDKs: environment, web identity, profile files (a role
// by source_profile or credential_source, web_identity_token_file, keys, credential_process),
// container, instance metadata v2. Threads may ask at once; one of them asks for new ones five
// minutes before they expire, and the others go on with the old ones as long as these hold. Where
// that fails, all do, and it is tried again every 30 seconds.
class CredentialSource {
 public:
  // `profile`: empty: AWS_PROFILE, or the chain. A profile that was named in any way comes before
  // the environment and has to be there.
  CredentialSource(std::string profile, std::shared_ptr<HttpClient> client);
  // Whatever finds them, by whatever clock.
  using Find = std::function<Credentials()>;
  using Now = std::function<std::chrono::system_clock::time_point()>;
  CredentialSource(Find find, Now now);
  ~CredentialSource();
  // Throws `not_found` that lists what was tried; `io`, `corrupt`, `timeout` or `invalid_argument`
  // where a profile, process or server is wrong, which the error names; `unsupported` for SSO and
  // MFA, with what to do. None: requests go unsigned (AWS_NO_SIGN_REQUEST or "anonymous" as the
  // profile).
  [[nodiscard]] std::optional<Credentials> get();
  // The server called them expired: the next get() asks anew.
  void drop();

 private:
  class Impl;
  [[nodiscard]] Impl& impl() const;

  Find find_;  // empty: requests go unsigned
  Now now_;
  PerProcess<Impl> impl_;
};

// A setting of a profile in ~/.aws/config and ~/.aws/credentials (or AWS_CONFIG_FILE and
// AWS_SHARED_CREDENTIALS_FILE): "region", "endpoint_url"; none: it is not there.
[[nodiscard]] std::optional<std::string> profile_setting(const std::string& profile,
                                                         const std::string& name);

}  // namespace tessera::s3
