#include "storage/http/uri.h"

#include <arpa/inet.h>

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "base/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kHexDigits = "0123456789ABCDEF";

bool is_letter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool is_control(char c) {
  return static_cast<unsigned char>(c) < 0x20 || c == 0x7f;
}

int value_of_hex(char c) {
  if (is_digit(c)) return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// No URL is in these texts: what is wrong in it may be a password.
[[noreturn]] void refuse(const std::string& reason) {
  throw Error(ErrorCode::invalid_argument, "this is no URL for Tessera: " + reason);
}

// How many bytes SCHEME has in SCHEME://; 0: `text` does not begin so.
std::size_t length_of_scheme(std::string_view text) {
  const std::size_t end = text.find("://");
  if (end == std::string_view::npos || end == 0 || !is_letter(text[0])) return 0;
  const auto is_of_scheme = [](char c) {
    return is_letter(c) || is_digit(c) || c == '+' || c == '-' || c == '.';
  };
  return std::ranges::all_of(text.substr(0, end), is_of_scheme) ? end : 0;
}

std::uint16_t parse_port(std::string_view text) {
  std::uint16_t port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port == 0)
    refuse("its port is no number from 1 to 65535");
  return port;
}

bool is_bracketed(std::string_view host) {
  return host.starts_with('[');
}

void require_host(const std::string& host, const std::string& scheme) {
  if (host.empty()) {
    if (scheme != "file") refuse("it names no host behind " + scheme + "://");
    return;
  }
  const auto is_of_address = [](char c) { return value_of_hex(c) >= 0 || c == ':' || c == '.'; };
  const auto is_of_name = [](char c) {
    return is_letter(c) || is_digit(c) || c == '-' || c == '.' || c == '_';
  };
  const bool is_good = is_bracketed(host)
                           ? std::ranges::all_of(host.substr(1, host.size() - 2), is_of_address)
                           : std::ranges::all_of(host, is_of_name);
  if (!is_good) refuse("its host has characters that no host has");
}

// Sets host and port of "host:port".
void take_authority(std::string_view authority, Uri& uri) {
  if (authority.find('@') != std::string_view::npos) {
    refuse("it has a user name or a password, which belong into the environment or a profile");
  }
  std::size_t end = authority.find(':');
  if (is_bracketed(authority)) {
    end = authority.find(']');
    if (end == std::string_view::npos) refuse("its host has an unclosed bracket");
    ++end;
  }
  uri.host = authority.substr(0, end);
  require_host(uri.host, uri.scheme);
  if (end >= authority.size()) return;
  if (authority[end] != ':') refuse("something stands behind its host");
  uri.port = parse_port(authority.substr(end + 1));
}

// Sets the scheme. Returns what stands behind "://".
std::string_view take_scheme(std::string_view text, Uri& uri) {
  const std::size_t scheme = length_of_scheme(text);
  if (scheme == 0) refuse("it does not begin with SCHEME://");
  if (std::ranges::any_of(text, is_control)) refuse("it has a control character");
  uri.scheme = lowered(text.substr(0, scheme));
  return text.substr(scheme + 3);
}

}  // namespace

bool is_url(std::string_view text) {
  return length_of_scheme(text) != 0;
}

Uri parse_uri(std::string_view text) {
  Uri uri;
  std::string_view rest = take_scheme(text, uri);
  if (rest.find('#') != std::string_view::npos)
    refuse("it has a fragment (write %23 for a # in a name)");
  const std::size_t end = std::min(rest.find_first_of("/?"), rest.size());
  take_authority(rest.substr(0, end), uri);
  rest.remove_prefix(end);
  const std::size_t mark = std::min(rest.find('?'), rest.size());
  uri.path = rest.substr(0, mark);
  if (mark < rest.size()) uri.query = rest.substr(mark + 1);
  return uri;
}

Uri parse_bucket_uri(std::string_view text) {
  Uri uri;
  const std::string_view rest = take_scheme(text, uri);
  const std::size_t end = std::min(rest.find('/'), rest.size());
  take_authority(rest.substr(0, end), uri);
  uri.path = rest.substr(end);
  return uri;
}

std::string to_string(const Uri& uri) {
  std::string text = uri.scheme + "://" + uri.host;
  if (uri.port != 0) text += ":" + std::to_string(uri.port);
  text += uri.path;
  if (!uri.query.empty()) text += "?" + uri.query;
  return text;
}

std::string authority_of(const Uri& uri) {
  const bool is_usual = uri.port == 0 || (uri.scheme == "http" && uri.port == 80) ||
                        (uri.scheme == "https" && uri.port == 443);
  return is_usual ? uri.host : uri.host + ":" + std::to_string(uri.port);
}

std::string_view without_query(std::string_view url) {
  return url.substr(0, url.find('?'));
}
std::string_view server_of(std::string_view url) {
  return url.substr(0, url.find_first_of("/?", url.find("://") + 3));
}

std::string percent_encoded(std::string_view text, bool keep_slashes) {
  std::string result;
  result.reserve(text.size());
  for (const char c : text) {
    const bool is_kept = is_letter(c) || is_digit(c) || c == '-' || c == '.' || c == '_' ||
                         c == '~' || (keep_slashes && c == '/');
    if (is_kept) {
      result += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      result += {'%', kHexDigits[byte >> 4U], kHexDigits[byte & 15U]};
    }
  }
  return result;
}

std::string percent_decoded(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  for (std::size_t at = 0; at < text.size(); ++at) {
    if (text[at] != '%') {
      result += text[at];
      continue;
    }
    const int high = at + 2 < text.size() ? value_of_hex(text[at + 1]) : -1;
    const int low = at + 2 < text.size() ? value_of_hex(text[at + 2]) : -1;
    if (high < 0 || low < 0) refuse("a % in it is not followed by two hexadecimal digits");
    result += static_cast<char>(high * 16 + low);
    at += 2;
  }
  return result;
}

bool is_loopback(const std::string& host) {
  in_addr address{};
  if (::inet_pton(AF_INET, host.c_str(), &address) == 1) return ntohl(address.s_addr) >> 24U == 127;
  return is_one_of<std::string_view>(host, "localhost", "[::1]");
}

bool is_loopback_url(const std::string& url) {
  return is_loopback(parse_uri(url).host);
}

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

// None: it is no web address that could be asked.
std::optional<Uri> web_address(const std::string& target) try {
  const auto is_of_url = [](char c) { return c > 0x20 && c < 0x7f; };
  const Uri uri = parse_uri(target);
  const bool is_good =
      std::ranges::all_of(target, is_of_url) && is_one_of(uri.scheme, "http", "https");
  return is_good ? std::optional(uri) : std::nullopt;
} catch (const Error&) {
  return std::nullopt;
}

[[noreturn]] void refuse_redirect(ErrorCode code, const std::string& url, const std::string& to) {
  throw Error(code, "the server sends the request on to " + to)
      .at_path(std::string(without_query(url)));
}

}  // namespace

std::optional<std::string> redirect_of(const std::string& url, const HttpResponse& response) {
  std::string location = response.header("location");
  location.resize(std::min(location.find('#'), location.size()));  // for browsers
  if (!is_redirect(response.status) || location.empty()) return std::nullopt;
  const Uri from = parse_uri(url);
  std::string target = absolute(location, from);
  const auto to = web_address(target);
  if (!to) refuse_redirect(ErrorCode::corrupt, url, "what is no web address");
  if (from.scheme == "https" && to->scheme != "https") {
    refuse_redirect(ErrorCode::unsafe, url, "plain http, where everyone can read and change it");
  }
  if (is_loopback(to->host) && !is_loopback(from.host))
    refuse_redirect(ErrorCode::unsafe, url, "this machine");
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
                                     std::string(server_of(asked)))
          .at_path(std::string(without_query(url)));
    }
    asked = *std::move(target);
  }
}

}  // namespace tessera
