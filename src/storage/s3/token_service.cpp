// AWS's token service, which gives credentials of a role for some time.
#include <algorithm>
#include <cctype>
#include <span>
#include <utility>
#include <vector>

#include "storage/http/uri.h"
#include "storage/s3/answers.h"
#include "storage/s3/profile_files.h"
#include "storage/s3/providers.h"
#include "storage/s3/settings.h"
#include "storage/s3/sigv4.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

using Fields = std::vector<std::pair<std::string, std::string>>;

constexpr std::size_t kMostAnswer = 1U << 20U;

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
