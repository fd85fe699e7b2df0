#include "storage/s3/providers.h"

#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <ctime>
#include <nlohmann/json.hpp>
#include <pugixml.hpp>

#include "base/fd.h"
#include "base/one_of.h"
#include "storage/http/loopback.h"
#include "storage/http/uri.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

extern char** environ;

namespace tessera::s3 {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMostOutput = 1U << 20U;
constexpr int kProcessMilliseconds = 60'000;

[[noreturn]] void refuse(const std::string& from, const std::string& why) {
  throw Error(ErrorCode::io, "credentials of " + from + ": " + why);
}

std::string text_in(const Json& json, const char* name, const std::string& from) {
  const auto found = json.find(name);
  if (found == json.end() || !found->is_string())
    refuse(from, std::string("the answer has no ") + name);
  return found->get<std::string>();
}

// `token`: what the answer calls the session's token.
Credentials of_json(const std::string& text, const char* token, const std::string& from) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) refuse(from, "the answer is no JSON");
  Credentials found{text_in(json, "AccessKeyId", from), text_in(json, "SecretAccessKey", from)};
  if (json.contains(token)) found.token = text_in(json, token, from);
  if (json.contains("Expiration")) found.expires = parse_time(text_in(json, "Expiration", from));
  return found;
}

// Words as a shell would divide them, without anything else that a shell does.
std::vector<std::string> words_of(const std::string& line) {
  std::vector<std::string> words;
  bool is_inside = false;
  char quote = '\0';
  for (std::size_t i = 0; i < line.size(); ++i) {
    char c = line[i];
    if (quote == '\0' && is_one_of(c, ' ', '\t')) {
      is_inside = false;
      continue;
    }
    if (!is_inside) words.emplace_back();
    is_inside = true;
    if (c == quote) {
      quote = '\0';
    } else if (quote == '\0' && is_one_of(c, '"', '\'')) {
      quote = c;
    } else {
      if (c == '\\' && quote != '\'' && i + 1 < line.size()) c = line[++i];
      words.back() += c;
    }
  }
  return words;
}

// What the process prints until it ends. It is killed when it takes too long or prints too much.
std::string output_of(std::vector<std::string> words) {
  const std::string from = "credential_process " + words.at(0);
  std::array<int, 2> ends{};
  if (::pipe2(ends.data(), O_CLOEXEC) != 0) refuse(from, "there is no pipe");
  const Fd out(ends[0]);
  Fd in(ends[1]);
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, in.get(), STDOUT_FILENO);
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t process = 0;
  const int failed =
      ::posix_spawnp(&process, arguments[0], &actions, nullptr, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (failed != 0) refuse(from, "it cannot be started");
  in = Fd();
  std::string text;
  std::array<char, 4096> window{};
  bool is_whole = false;
  for (pollfd ready{out.get(), POLLIN, 0}; ::poll(&ready, 1, kProcessMilliseconds) == 1;) {
    const ssize_t got = ::read(out.get(), window.data(), window.size());
    if (got <= 0) {
      is_whole = got == 0;
      break;
    }
    text.append(window.data(), static_cast<std::size_t>(got));
    if (text.size() > kMostOutput) break;
  }
  if (!is_whole) ::kill(process, SIGKILL);
  int status = 0;
  ::waitpid(process, &status, 0);
  if (!is_whole) refuse(from, "it took too long or printed too much");
  if (status != 0) refuse(from, "it failed");
  return text;
}

HttpOptions local_options() {
  HttpOptions options;
  options.allow_http = true;  // of this machine or its hypervisor
  options.connect_within = std::chrono::milliseconds(1000);
  options.operation_within = std::chrono::seconds(10);
  options.most_unanswered = 2;
  return options;
}

std::string body_of(HttpClient& client, const HttpRequest& request, const std::string& from) {
  const HttpResponse response = client.send([&](int) { return request; });
  if (response.status != 200)
    refuse(from, "the answer's status is " + std::to_string(response.status));
  return response.text();
}

}  // namespace

std::chrono::system_clock::time_point parse_time(const std::string& text) {
  std::tm time{};
  const char* const rest = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &time);
  if (rest == nullptr)
    throw Error(ErrorCode::corrupt, "credentials with an Expiration that is no time");
  return std::chrono::system_clock::from_time_t(::timegm(&time));
}

Credentials of_process(const std::string& command) {
  std::vector<std::string> words = words_of(command);
  if (words.empty()) refuse("credential_process", "it is empty");
  const std::string from = "credential_process " + words[0];
  return of_json(output_of(std::move(words)), "SessionToken", from);
}

Credentials of_web_identity(const std::string& token_file, const std::string& role,
                            HttpClient& client) {
  std::string token = read_small_file(token_file);
  while (token.ends_with('\n')) token.pop_back();
  std::string endpoint = variable("AWS_ENDPOINT_URL_STS");
  if (endpoint.empty()) {
    const std::string region = variable("AWS_REGION");
    endpoint = "https://sts." + (region.empty() ? "" : region + ".") + "amazonaws.com";
  }
  std::string session = variable("AWS_ROLE_SESSION_NAME");
  if (session.empty()) session = "tessera";
  const std::string form = "Action=AssumeRoleWithWebIdentity&Version=2011-06-15&RoleArn=" +
                           percent_encoded(role, false) +
                           "&RoleSessionName=" + percent_encoded(session, false) +
                           "&WebIdentityToken=" + percent_encoded(token, false);
  HttpRequest request{.method = "POST", .url = endpoint + "/"};
  request.headers = {{"content-type", "application/x-www-form-urlencoded"}};
  request.body = {std::as_bytes(std::span(form.data(), form.size()))};
  const std::string from = "web identity", xml = body_of(client, request, from);
  pugi::xml_document document;
  if (!document.load_buffer(xml.data(), xml.size())) refuse(from, "the answer is no XML");
  const pugi::xml_node node =
      document.document_element().child("AssumeRoleWithWebIdentityResult").child("Credentials");
  Credentials found{node.child("AccessKeyId").text().get(),
                    node.child("SecretAccessKey").text().get(),
                    node.child("SessionToken").text().get()};
  if (found.key_id.empty() || found.secret.empty()) refuse(from, "the answer has no keys");
  found.expires = parse_time(node.child("Expiration").text().get());
  return found;
}

std::optional<Credentials> of_container() {
  const std::string relative = variable("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI");
  std::string url = variable("AWS_CONTAINER_CREDENTIALS_FULL_URI");
  if (relative.empty() && url.empty()) return std::nullopt;
  const std::string from = "the container";
  if (!relative.empty()) url = "http://169.254.170.2" + relative;
  const Uri uri = parse_uri(url);
  const bool is_near = is_loopback(uri.host) ||
                       is_one_of<std::string_view>(uri.host, "169.254.170.2", "169.254.170.23");
  if (!is_near && uri.scheme != "https") refuse(from, "plain http to another machine");
  HttpClient client(local_options());
  HttpRequest request{.url = url};
  std::string token = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN");
  const std::string file = variable("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE");
  if (!file.empty()) token = read_small_file(file);
  while (token.ends_with('\n')) token.pop_back();
  if (!token.empty()) request.headers.emplace_back("authorization", token);
  return of_json(body_of(client, request, from), "Token", from);
}

std::optional<Credentials> of_instance() {
  if (variable("AWS_EC2_METADATA_DISABLED") == "true") return std::nullopt;
  std::string server = variable("AWS_EC2_METADATA_SERVICE_ENDPOINT");
  if (server.empty()) server = "http://169.254.169.254";
  while (server.ends_with('/')) server.pop_back();
  const std::string from = "the instance";
  HttpClient client(local_options());
  HttpRequest ask{.method = "PUT", .url = server + "/latest/api/token"};
  ask.headers = {{"x-aws-ec2-metadata-token-ttl-seconds", "21600"}};
  HttpResponse token;
  try {
    token = client.send([&](int) { return ask; });
  } catch (const Error&) {
    return std::nullopt;  // this is no such machine
  }
  if (token.status != 200) return std::nullopt;
  const std::string roles = server + "/latest/meta-data/iam/security-credentials/";
  HttpRequest request{.url = roles, .headers = {{"x-aws-ec2-metadata-token", token.text()}}};
  const HttpResponse role = client.send([&](int) { return request; });
  if (role.status != 200) return std::nullopt;
  const std::string names = role.text();
  request.url = roles + percent_encoded(names.substr(0, names.find('\n')), false);
  return of_json(body_of(client, request, from), "Token", from);
}

}  // namespace tessera::s3
