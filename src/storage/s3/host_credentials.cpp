// Credentials that a container or a machine of a cloud has for what runs in it.
#include <algorithm>

#include "base/one_of.h"
#include "storage/http/loopback.h"
#include "storage/http/uri.h"
#include "storage/s3/answers.h"
#include "storage/s3/profile_files.h"
#include "storage/s3/providers.h"
#include "tessera/error.h"

namespace tessera::s3 {
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
  std::string value = variable("AWS_EC2_METADATA_DISABLED");
  std::ranges::transform(value, value.begin(), [](unsigned char c) { return std::tolower(c); });
  return value == "true";
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

}  // namespace tessera::s3
