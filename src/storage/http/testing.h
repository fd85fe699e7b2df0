// What the tests of requests share.
#pragma once

#include <chrono>
#include <span>
#include <string>
#include <utility>

#include "conformance/loopback_server.h"
#include "storage/http/client.h"

namespace tessera::testing_support {

using namespace std::chrono_literals;  // NOLINT(google-build-using-namespace)
inline HttpOptions quick() {
  return {.connect_within = 2000ms, .slow_for = 1s, .operation_within = 20s, .first_pause = 2ms};
}

inline HttpClient::Prepare always(HttpRequest request) {
  return [request = std::move(request)](int) { return request; };
}

inline Scripted scripted(int status, const std::string& body = {},
                         const std::string& headers = {}) {
  return {http_answer(status, body, headers)};
}

inline HttpRequest get(const std::string& url) {
  return {.url = url};
}

inline MutableByteView room(std::string& text) {
  return std::as_writable_bytes(std::span(text));
}

}  // namespace tessera::testing_support
