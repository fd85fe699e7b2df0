// In which order credentials are looked for.
#include <algorithm>
#include <vector>

#include "base/one_of.h"
#include "storage/s3/profile_files.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

[[noreturn]] void refuse(const std::string& why) {
  throw Error(ErrorCode::invalid_argument, why);
}

std::string setting(const Profile& profile, const char* name) {
  const auto found = profile.find(name);
  return found == profile.end() ? std::string() : found->second;
}

std::optional<Credentials> of_environment() {
  Credentials found{variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"),
                    variable("AWS_SESSION_TOKEN")};
  if (found.key_id.empty() && found.secret.empty()) return std::nullopt;
  if (!found.key_id.empty() && !found.secret.empty()) return found;
  refuse("of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is set, and the other is not");
}

std::optional<Credentials> keys_of(const Profile& profile, const std::string& name) {
  Credentials found{setting(profile, "aws_access_key_id"),
                    setting(profile, "aws_secret_access_key"),
                    setting(profile, "aws_session_token")};
  if (found.key_id.empty() && found.secret.empty()) return std::nullopt;
  if (!found.key_id.empty() && !found.secret.empty()) return found;
  refuse("the profile '" + name +
         "' has one of aws_access_key_id and aws_secret_access_key, and not the other");
}

std::string region_of_variables() {
  const std::string region = variable("AWS_REGION");
  return region.empty() ? variable("AWS_DEFAULT_REGION") : region;
}

Role role_of(const Profile& profile) {
  const std::string region = region_of_variables();
  return {.arn = setting(profile, "role_arn"),
          .session = setting(profile, "role_session_name"),
          .external_id = setting(profile, "external_id"),
          .seconds = setting(profile, "duration_seconds"),
          .region = region.empty() ? setting(profile, "region") : region};
}

std::optional<Credentials> of_web_identity_variables(HttpClient& client) {
  const std::string token_file = variable("AWS_WEB_IDENTITY_TOKEN_FILE");
  if (token_file.empty()) return std::nullopt;
  return of_web_identity(token_file,
                         {.arn = variable("AWS_ROLE_ARN"),
                          .session = variable("AWS_ROLE_SESSION_NAME"),
                          .region = region_of_variables()},
                         client);
}

std::optional<Credentials> of_credential_source(const std::string& source) {
  if (source == "Environment") return of_environment();
  if (source == "EcsContainer") return of_container();
  if (source == "Ec2InstanceMetadata") return of_instance();
  refuse("there is no credential_source '" + source + "'");
}

// The profiles of one chain of roles.
class Profiles {
 public:
  explicit Profiles(HttpClient& client) : client_(client) {}

  // None: the profile has nothing of the kind. Throws `not_found` if there is no such profile.
  std::optional<Credentials> credentials_of(const std::string& name) {
    const auto profile = read_profile(name);
    if (!profile) {
      throw Error(ErrorCode::not_found, "there is no profile '" + name +
                                            "' in AWS's files of configuration and credentials");
    }
    if (std::ranges::find(passed_, name) != passed_.end())
      refuse("the profile '" + name + "' takes its role by a profile that takes its role by it");
    passed_.push_back(name);
    const bool takes_role = !setting(*profile, "source_profile").empty() ||
                            !setting(*profile, "credential_source").empty();
    if (takes_role) return of_role_in(*profile, name);
    const std::string token_file = setting(*profile, "web_identity_token_file");
    if (!token_file.empty()) return of_web_identity(token_file, role_of(*profile), client_);
    if (auto found = keys_of(*profile, name)) return found;
    const std::string process = setting(*profile, "credential_process");
    if (!process.empty()) return of_process(process);
    if (setting(*profile, "sso_session").empty() && setting(*profile, "sso_start_url").empty())
      return std::nullopt;
    throw Error(ErrorCode::unsupported,
                "the profile '" + name +
                    "' signs on by SSO: give another one credential_process ="
                    " aws configure export-credentials --format process --profile " +
                    name);
  }

 private:
  Credentials of_role_in(const Profile& profile, const std::string& name) {
    if (!setting(profile, "mfa_serial").empty()) {
      throw Error(
          ErrorCode::unsupported,
          "the profile '" + name + "' asks for a code of MFA: give it a credential_process");
    }
    const std::string source = setting(profile, "source_profile");
    // A profile that names itself means the keys that stand in it.
    const auto own = source.empty()   ? of_credential_source(setting(profile, "credential_source"))
                     : source == name ? keys_of(profile, name)
                                      : credentials_of(source);
    if (!own) {
      throw Error(ErrorCode::not_found,
                  "the profile '" + name + "' takes a role by credentials that are not there");
    }
    return of_role(role_of(profile), *own, client_);
  }

  HttpClient& client_;
  std::vector<std::string> passed_;
};

}  // namespace

Credentials find_credentials(const std::string& profile, HttpClient& client) {
  if (!profile.empty()) {
    if (auto found = Profiles(client).credentials_of(profile)) return *std::move(found);
    throw Error(ErrorCode::not_found, "the profile '" + profile + "' has no credentials");
  }
  if (auto found = of_environment()) return *std::move(found);
  if (auto found = of_web_identity_variables(client)) return *std::move(found);
  if (read_profile("default")) {
    if (auto found = Profiles(client).credentials_of("default")) return *std::move(found);
  }
  if (auto found = of_container()) return *std::move(found);
  if (auto found = of_instance()) return *std::move(found);
  throw Error(ErrorCode::not_found,
              "no credentials: not in AWS_ACCESS_KEY_ID, AWS_WEB_IDENTITY_TOKEN_FILE, the default "
              "profile, the container or the instance. For a public bucket set "
              "AWS_NO_SIGN_REQUEST=1");
}

}  // namespace tessera::s3
