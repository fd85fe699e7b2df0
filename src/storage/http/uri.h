// URLs: taken apart, put together, percent-encoded.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>

#include "storage/http/client.h"

namespace tessera {

// scheme://host[:port]/path[?query]. Names with user names, passwords or fragments are refused:
// credentials are never part of a URL.
struct Uri {
  std::string scheme;      // lower case
  std::string host;        // of s3: the bucket; of file: may be empty; IPv6 in its brackets
  std::uint16_t port = 0;  // 0: that of the scheme
  std::string path;        // begins with a slash, or is empty; as it was written
  std::string query;       // without the question mark; as it was written
};

// Whether `text` begins with SCHEME://.
[[nodiscard]] bool is_url(std::string_view text);
// Throws `invalid_argument` that names what is wrong, without repeating a password.
[[nodiscard]] Uri parse_uri(std::string_view text);
// SCHEME://BUCKET/KEY, as it is: '?', '#' and '%' are characters of the key, which is Uri::path.
[[nodiscard]] Uri parse_bucket_uri(std::string_view text);
[[nodiscard]] std::string to_string(const Uri& uri);
// "host:port", or "host" where the port is that of http or https.
[[nodiscard]] std::string authority_of(const Uri& uri);
// A URL as an error tells it: a query may hold a signature.
[[nodiscard]] std::string_view without_query(std::string_view url);
// SCHEME://HOST[:PORT]: what an error tells of a URL that a server has named.
[[nodiscard]] std::string_view server_of(std::string_view url);

// Encodes all bytes but A-Z a-z 0-9 - . _ ~ and, where `keep_slashes`, '/' (the rule of SigV4).
[[nodiscard]] std::string percent_encoded(std::string_view text, bool keep_slashes);
// Throws `invalid_argument` for a '%' that two hexadecimal digits do not follow.
[[nodiscard]] std::string percent_decoded(std::string_view text);

// Which hosts are this machine.

// 127.x.x.x, ::1 and localhost.
[[nodiscard]] bool is_loopback(const std::string& host);
[[nodiscard]] bool is_loopback_url(const std::string& url);

// Redirects of an answer. HttpClient follows nothing by itself: a signature or a token is for one
// host.

// The absolute URL that a 301, 302, 303, 307 or 308 to `url` names in its Location; none: it is no
// redirect, or names nothing. Throws `corrupt` for what is no web address, and `unsafe` for one
// from https to http and for one to a host of this machine from another one.
[[nodiscard]] std::optional<std::string> redirect_of(const std::string& url,
                                                     const HttpResponse& response);

// A new name, its place, and what serves that: so many redirects are followed.
inline constexpr int kMostRedirects = 5;

// Sends what `make` makes of `url`, and of each URL that a server sends it on to. Throws `io` for
// more than kMostRedirects of them, else what redirect_of() and HttpClient::send() throw.
[[nodiscard]] HttpResponse send_following(
    HttpClient& client, const std::string& url,
    const std::function<HttpRequest(const std::string& url)>& make);

}  // namespace tessera
