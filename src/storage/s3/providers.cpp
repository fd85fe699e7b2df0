#include "storage/s3/providers.h"

#include <algorithm>
#include <cctype>
#include <span>
#include <utility>
#include <vector>

#include "base/text.h"
#include "storage/http/uri.h"
#include "storage/s3/credentials.h"
#include "storage/s3/settings.h"
#include "storage/s3/sigv4.h"
#include "tessera/error.h"

namespace tessera::s3 {

// In which order credentials are looked for.

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

// Credentials that a container or a machine of a cloud has for what runs in it.

namespace {

using namespace std::chrono_literals;

constexpr std::size_t kMostAnswer = 1U << 20U;

// Plain http, since these hosts are this machine or its hypervisor; and no proxy, for which they
// would be others.
HttpClient local_client() {
  return HttpClient({.connect_within = 1s,
                     .slow_for = 5s,
                     .operation_within = 10s,
                     .most_unanswered = 2,
                     .allow_http = true,
                     .allow_proxy = false});
}

// Addresses of containers' and of instances' services.
void require_near(const std::string& url) {
  const Uri uri = parse_uri(url);
  const bool is_near =
      is_loopback(uri.host) ||
      is_one_of<std::string_view>(uri.host, "169.254.170.2", "169.254.170.23", "[fd00:ec2::23]",
                                  "169.254.169.254", "[fd00:ec2::254]");
  if (is_near || uri.scheme == "https") return;
  throw Error(ErrorCode::unsafe, "credentials would come by plain http from another machine")
      .at_path(uri.scheme + "://" + authority_of(uri));
}

std::string text_of(HttpClient& client, const HttpRequest& request, const std::string& from) {
  const HttpResponse response = client.send([&](int) { return request; });
  if (response.status != 200)
    refuse_credentials(from, "the answer's status is " + std::to_string(response.status));
  return response.text();
}

std::string container_token() {
  const std::string file = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
  return without_line_end(file.empty() ? variable("AWS_CONTAINER_AUTHORIZATION_TOKEN")
                                       : read_small_file(file));
}

bool is_disabled() {
  return lowered(variable("AWS_EC2_METADATA_DISABLED")) == "true";
}

std::string metadata_server() {
  std::string server = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  if (server.empty()) return "http://169.254.169.254";
  while (server.ends_with('/')) server.pop_back();
  require_near(server);
  return server;
}

// The token without which the service says nothing; none: this is no such machine.
std::optional<std::string> metadata_token(HttpClient& client, const std::string& server) {
  const HttpRequest request{.method = "PUT",
                            .url = server + "/latest/api/token",
                            .headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}},
                            .most_body = kMostAnswer};
  try {
    const HttpResponse response = client.send([&](int) { return request; });
    return response.status == 200 ? std::optional(response.text()) : std::nullopt;
  } catch (const Error& error) {
    if (is_one_of(error.code(), ErrorCode::io, ErrorCode::timeout)) return std::nullopt;
    throw;
  }
}

}  // namespace

std::optional<Credentials> of_container() {
  const std::string relative = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  const std::string full = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (relative.empty() && full.empty()) return std::nullopt;
  HttpRequest request{.url = relative.empty() ? full : "http://169.254.170.2" + relative,
                      .most_body = kMostAnswer};
  require_near(request.url);
  if (std::string token = container_token(); !token.empty())
    request.headers.emplace_back("authorization", std::move(token));
  HttpClient client = local_client();
  const std::string from = "the container";
  return credentials_of_json(text_of(client, request, from), "Token", from);
}

std::optional<Credentials> of_instance() {
  if (is_disabled()) return std::nullopt;
  const std::string server = metadata_server(), from = "the instance";
  HttpClient client = local_client();
  const auto token = metadata_token(client, server);
  if (!token) return std::nullopt;
  const std::string roles = server + "/latest/meta-data/iam/security-credentials/";
  HttpRequest request{
      .url = roles, .headers = {{"x-aws-ec2-metadata-token", *token}}, .most_body = kMostAnswer};
  const HttpResponse listed = client.send([&](int) { return request; });
  const std::string names = listed.text();
  if (listed.status == 404 || names.empty()) return std::nullopt;
  if (listed.status != 200)
    refuse_credentials(from, "the answer's status is " + std::to_string(listed.status));
  request.url = roles + percent_encoded(names.substr(0, names.find_first_of("\r\n")), false);
  return credentials_of_json(text_of(client, request, from), "Token", from);
}

// AWS's token service, which gives credentials of a role for some time.

namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

std::string form_of(const Fields& fields) {
  std::string form;
  for (const auto& [name, value] : fields) {
    if (value.empty()) continue;
    form += (form.empty() ? "" : "&") + name + "=" + percent_encoded(value, false);
  }
  return form;
}

Fields fields_of(const std::string& action, const Role& role) {
  if (role.arn.empty())
    throw Error(ErrorCode::invalid_argument, "credentials of a role need its ARN");
  return {{"Action", action},
          {"Version", "2011-06-15"},
          {"RoleArn", role.arn},
          {"RoleSessionName", role.session.empty() ? "tessera" : role.session},
          {"ExternalId", role.external_id},
          {"DurationSeconds", role.seconds}};
}

std::string service_url(const Role& role) {
  std::string url = variable("AWS_ENDPOINT_URL_STS");
  if (url.empty())
    url = "https://" + (role.region.empty() ? "sts.amazonaws.com" : aws_host("sts", role.region));
  return url.ends_with('/') ? url : url + "/";
}

// The code of an error, "ExpiredToken". A message would repeat what was sent.
std::string code_in(const std::string& answer) {
  const std::size_t begin = answer.find("<Code>");
  if (begin == std::string::npos) return {};
  std::string code = answer.substr(begin + 6, 64);
  code.erase(std::min(code.find('<'), code.size()));
  const bool is_plain =
      std::ranges::all_of(code, [](unsigned char c) { return std::isalpha(c) != 0; });
  return is_plain ? ", " + code : std::string();
}

// `own`: who signs; null: nobody.
Credentials ask(const Fields& fields, const Role& role, const Credentials* own,
                HttpClient& client) {
  const std::string from = "the role " + role.arn, form = form_of(fields);
  const ByteView body = std::as_bytes(std::span(form.data(), form.size()));
  const auto prepare = [&](int) {
    HttpRequest request{.method = "POST",
                        .url = service_url(role),
                        .headers = {{"content-type", "application/x-www-form-urlencoded"}},
                        .ca_file = variable("AWS_CA_BUNDLE"),
                        .body = {body},
                        .most_body = kMostAnswer};
    if (own != nullptr) {
      const SigningScope scope{.region = role.region.empty() ? "us-east-1" : role.region,
                               .service = "sts",
                               .now = std::chrono::system_clock::now()};
      sign(request, *own, scope, sha256_hex(body));
    }
    return request;
  };
  const HttpResponse response = client.send(prepare);
  if (response.status != 200) {
    refuse_credentials(from, "the token service answered " + std::to_string(response.status) +
                                 code_in(response.text()));
  }
  return credentials_of_xml(response.text(), fields[0].second, from);
}

}  // namespace

Credentials of_web_identity(const std::string& token_file, const Role& role, HttpClient& client) {
  Fields fields = fields_of("AssumeRoleWithWebIdentity", role);
  fields.emplace_back("WebIdentityToken", without_line_end(read_small_file(token_file)));
  return ask(fields, role, nullptr, client);
}

Credentials of_role(const Role& role, const Credentials& own, HttpClient& client) {
  return ask(fields_of("AssumeRole", role), role, &own, client);
}

}  // namespace tessera::s3
