// Where an answer sends the caller. HttpClient follows nothing by itself: a signature or a token is
// for one host.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "storage/http/client.h"

namespace tessera {

// The absolute URL that a 301, 302, 303, 307 or 308 to `url` names in its Location; none: it is no
// redirect, or names nothing. Throws `unsafe` for one from https to http, and for one to a host of
// this machine from another one.
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
