#include "storage/http/redirect.h"

#include <string>
#include <utility>

#include "base/one_of.h"
#include "storage/http/loopback.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_redirect(int status) {
  return is_one_of(status, 301, 302, 303, 307, 308);
}

// `location` may leave out, from the left, what it has in common with `from`.
std::string absolute(const std::string& location, const Uri& from) {
  if (is_url(location)) return location;
  if (location.starts_with("//")) return from.scheme + ":" + location;
  Uri base = from;
  base.query.clear();
  if (location.starts_with('/')) {
    base.path.clear();
  } else {
    base.path.resize(base.path.rfind('/') + 1);  // 0: it has no slash, as it has no bytes
    if (base.path.empty()) base.path = "/";
  }
  return to_string(base) + location;
}

}  // namespace

std::optional<std::string> redirect_of(const std::string& url, const HttpResponse& response) {
  std::string location = response.header("location");
  location.resize(std::min(location.find('#'), location.size()));  // for browsers
  if (!is_redirect(response.status) || location.empty()) return std::nullopt;
  const Uri from = parse_uri(url);
  std::string target = absolute(location, from);
  const Uri to = parse_uri(target);
  if (from.scheme == "https" && to.scheme != "https") {
    throw Error(ErrorCode::unsafe, "the server sends the request on to plain " + to.scheme +
                                       ", where everyone can read and change it")
        .at_path(std::string(without_query(url)));
  }
  if (is_loopback(to.host) && !is_loopback(from.host)) {
    throw Error(ErrorCode::unsafe, "the server sends the request on to this machine")
        .at_path(std::string(without_query(url)));
  }
  return target;
}

HttpResponse send_following(HttpClient& client, const std::string& url,
                            const std::function<HttpRequest(const std::string& url)>& make) {
  std::string asked = url;
  for (int redirects = 0;; ++redirects) {
    HttpResponse response = client.send([&](int) { return make(asked); });
    auto target = redirect_of(asked, response);
    if (!target) return response;
    if (redirects == kMostRedirects) {
      throw Error(ErrorCode::io, "the server sends the request on more than " +
                                     std::to_string(kMostRedirects) + " times, at last from " +
                                     std::string(without_query(asked)))
          .at_path(std::string(without_query(url)));
    }
    asked = *std::move(target);
  }
}

}  // namespace tessera
