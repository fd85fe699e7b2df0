#include "storage/s3/credentials.h"

#include <mutex>
#include <utility>

#include "storage/s3/profile_files.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

constexpr std::chrono::minutes kBefore{5};

std::string setting(const Profile& profile, const char* name) {
  const auto found = profile.find(name);
  return found == profile.end() ? std::string() : found->second;
}

std::optional<Credentials> of_environment() {
  Credentials found{variable("AWS_ACCESS_KEY_ID"), variable("AWS_SECRET_ACCESS_KEY"),
                    variable("AWS_SESSION_TOKEN")};
  if (found.key_id.empty() && found.secret.empty()) return std::nullopt;
  if (!found.key_id.empty() && !found.secret.empty()) return found;
  throw Error(ErrorCode::invalid_argument,
              "of AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY one is set, and the other is not");
}

}  // namespace

class CredentialSource::Impl {
 public:
  Impl(std::string profile, std::shared_ptr<HttpClient> client)
      : profile_(profile.empty() ? variable("AWS_PROFILE") : std::move(profile)),
        client_(std::move(client)) {}

  std::optional<Credentials> get() {
    const std::lock_guard lock(mutex_);
    if (is_anonymous()) return std::nullopt;
    const auto now = std::chrono::system_clock::now();
    if (found_ && (!found_->expires || now + kBefore < *found_->expires)) return found_;
    try {
      found_ = look();
    } catch (const Error&) {
      const bool still_hold = found_ && found_->expires && now < *found_->expires;
      if (!still_hold) throw;
    }
    return found_;
  }

  void drop() {
    const std::lock_guard lock(mutex_);
    found_.reset();
  }

 private:
  [[nodiscard]] bool is_anonymous() const {
    return profile_ == "anonymous" || variable("AWS_NO_SIGN_REQUEST") == "1" ||
           variable("AWS_NO_SIGN_REQUEST") == "true";
  }

  [[nodiscard]] Credentials look() const {
    if (!profile_.empty()) return of_named_profile();
    if (auto found = of_environment()) return *std::move(found);
    const std::string token_file = variable("AWS_WEB_IDENTITY_TOKEN_FILE");
    if (!token_file.empty()) return of_web_identity(token_file, variable("AWS_ROLE_ARN"), *client_);
    if (const auto profile = read_profile("default")) {
      if (auto found = of_profile(*profile)) return *std::move(found);
    }
    if (auto found = of_container()) return *std::move(found);
    if (auto found = of_instance()) return *std::move(found);
    throw Error(ErrorCode::not_found,
                "no credentials: not in AWS_ACCESS_KEY_ID, AWS_WEB_IDENTITY_TOKEN_FILE, the "
                "default profile, the container or the instance. For a public bucket set "
                "AWS_NO_SIGN_REQUEST=1");
  }

  [[nodiscard]] Credentials of_named_profile() const {
    const auto profile = read_profile(profile_);
    if (!profile) {
      throw Error(ErrorCode::not_found, "there is no profile '" + profile_ +
                                            "' in AWS's files of configuration and credentials");
    }
    if (auto found = of_profile(*profile)) return *std::move(found);
    throw Error(ErrorCode::not_found, "the profile '" + profile_ + "' has no credentials");
  }

  [[nodiscard]] std::optional<Credentials> of_profile(const Profile& profile) const {
    Credentials found{setting(profile, "aws_access_key_id"),
                      setting(profile, "aws_secret_access_key"),
                      setting(profile, "aws_session_token")};
    if (!setting(profile, "source_profile").empty()) {
      throw Error(ErrorCode::unsupported,
                  "a profile that takes a role by another profile: give it credential_process = "
                  "aws configure export-credentials --format process --profile NAME");
    }
    if (!found.key_id.empty() && !found.secret.empty()) return found;
    const std::string token_file = setting(profile, "web_identity_token_file");
    if (!token_file.empty())
      return of_web_identity(token_file, setting(profile, "role_arn"), *client_);
    const std::string process = setting(profile, "credential_process");
    if (!process.empty()) return of_process(process);
    return std::nullopt;
  }

  const std::string profile_;  // empty: the chain
  const std::shared_ptr<HttpClient> client_;
  std::mutex mutex_;
  std::optional<Credentials> found_;
};

CredentialSource::CredentialSource(std::string profile, std::shared_ptr<HttpClient> client)
    : impl_(std::make_unique<Impl>(std::move(profile), std::move(client))) {}
CredentialSource::~CredentialSource() = default;

std::optional<Credentials> CredentialSource::get() {
  return impl_->get();
}

void CredentialSource::drop() {
  impl_->drop();
}

}  // namespace tessera::s3
