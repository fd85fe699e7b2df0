// Who we are to an S3 endpoint. Secrets are in no error, log or argument list.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/process.h"
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

// What those say who give credentials. Errors name `from`, and repeat nothing of the answer.

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

// AWS's files of profiles.

using Profile = std::map<std::string, std::string>;

// What a section may be called: in ~/.aws/config "[profile x]", in ~/.aws/credentials "[x]".
enum class SectionsAre { of_config, names };

// "[name]" and "name = value" lines, as Python's configparser and so AWS's own tools read them: a
// line that is indented deeper than the setting above belongs to that one, and is left out, as are
// comments and sections of other kinds. Of "[services x]" it is kept, as "s3.endpoint_url" of a
// profile services_section("x"). Names of settings are in lower case.
[[nodiscard]] std::map<std::string, Profile> parse_profiles(const std::string& text,
                                                            SectionsAre sections);
[[nodiscard]] std::string services_section(const std::string& name);
// The profile in ~/.aws/config and ~/.aws/credentials together, where the second has precedence;
// none: neither has it. A file that is not there has no profiles; one that cannot be read is `io`.
[[nodiscard]] std::optional<Profile> read_profile(const std::string& name);

// A file of at most 1 MiB, whole. Throws `not_found`, `io` or `limit`.
[[nodiscard]] std::string read_small_file(const std::string& path);
[[nodiscard]] std::string without_line_end(std::string text);
[[nodiscard]] std::string variable(const char* name);  // of the environment; "": not set

}  // namespace tessera::s3
