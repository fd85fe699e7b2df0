#include <algorithm>

#include "storage/http/client.h"
#include "storage/http/uri.h"

namespace tessera {
namespace {

// Of a reason, message or id in an error.
constexpr std::size_t kMostText = 300;

// One line, whatever the server sent.
std::string printable(std::string_view text) {
  std::string line(text.substr(0, kMostText));
  std::ranges::replace_if(
      line, [](char c) { return c < 0x20 || c == 0x7f; }, '?');
  return line;
}

// What stands between <NAME> and </NAME>; empty: nothing does.
std::string element(std::string_view xml, const std::string& name) {
  const std::string begin = "<" + name + ">";
  const std::size_t from = xml.find(begin);
  if (from == std::string_view::npos) return {};
  const std::size_t end = xml.find('<', from + begin.size());
  if (end == std::string_view::npos) return {};
  return printable(xml.substr(from + begin.size(), end - from - begin.size()));
}

std::string request_id(const HttpResponse& response) {
  for (const char* name : {"x-amz-request-id", "x-guploader-uploadid", "x-request-id", "cf-ray"}) {
    if (std::string id = response.header(name); !id.empty()) return printable(id);
  }
  return {};
}

}  // namespace

std::string HttpResponse::header(const std::string& name) const {
  const auto found = headers.find(name);
  return found == headers.end() ? std::string() : found->second;
}

std::string HttpResponse::text() const {
  return {reinterpret_cast<const char*>(body.data()), body.size()};
}

std::string describe(const HttpRequest& request, const HttpResponse& response) {
  std::string line = request.method + " " + std::string(without_query(request.url)) + ": " +
                     std::to_string(response.status);
  if (!response.reason.empty()) line += " " + printable(response.reason);
  if (const std::string id = request_id(response); !id.empty()) line += ", request id " + id;
  const std::string text = response.text();
  const std::string code = element(text, "Code"), message = element(text, "Message");
  if (!code.empty()) line += ", " + code;
  if (!message.empty()) line += ": " + message;
  return line;
}

}  // namespace tessera
