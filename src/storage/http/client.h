// Requests over HTTP: bodies straight from and into memory, deadlines, retries, counts. The only
// place that knows libcurl.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/process.h"
#include "storage/http/pieces.h"
#include "tessera/io.h"

namespace tessera {

struct HttpRequest {
  std::string method = "GET";
  std::string url;  // as it goes over the wire: percent-encoded
  std::vector<std::pair<std::string, std::string>> headers = {};
  std::string ca_file = {};         // of who vouches for the server, if the options name none
  std::vector<ByteView> body = {};  // sent one behind the other; lives until the answer is there
  // The place of the body of a 200 or 206, which has to fill it. Empty: it goes into
  // HttpResponse::body.
  Scattered into = {};
  // The most bytes of a body that goes into HttpResponse::body; a longer one is `limit`.
  std::size_t most_body = 16U << 20U;
  // The time in which the server may send nothing where it works before it answers, as on a copy,
  // if that is longer than HttpOptions::slow_for. Any byte shows that it lives, whatever their
  // rate.
  std::chrono::seconds works_for{0};
};

struct HttpResponse {
  int status = 0;
  std::string reason;  // "Not Found"
  // By names in lower case, the last of each; all of Link and Content-Encoding, joined by commas.
  std::map<std::string, std::string> headers;
  std::vector<std::byte> body;
  int attempts = 1;  // how many times it was sent

  // "" where there is none.
  [[nodiscard]] std::string header(const std::string& name) const;
  [[nodiscard]] std::string text() const;  // the body
};

// A variable, if it is set, comes before the option that it stands beside.
struct HttpOptions {
  int most_in_flight = 16;  // TESSERA_HTTP_REQUESTS; halved on 503 and 429, grows again
  std::chrono::milliseconds connect_within{10'000};
  // Below `least_rate` for so long: again. TESSERA_HTTP_STALL, in seconds.
  std::chrono::seconds slow_for{30};
  std::uint64_t least_rate = 1024;  // bytes a second
  // The limit for all attempts together. TESSERA_HTTP_DEADLINE, in seconds.
  std::chrono::seconds operation_within{600};
  std::chrono::milliseconds first_pause{100};  // doubles up to 20 s, with jitter
  int most_unanswered = 8;                     // attempts one behind the other where nobody listens
  // Plain http is for loopback alone, unless this or TESSERA_ALLOW_HTTP=1 says otherwise.
  bool allow_http = false;
  bool allow_proxy = true;   // of the environment; loopback is never asked by one
  std::string ca_file = {};  // empty: TESSERA_CA_FILE, the request's, the system's
};

struct HttpCounts {
  std::uint64_t requests = 0, retries = 0;
  std::uint64_t bytes_sent = 0, bytes_received = 0;
  std::uint64_t bytes_again = 0;  // of attempts that did not succeed, both ways
};

// Threads may send at once; each waits for its answer. A child of fork() has connections, limit and
// counts of its own.
class HttpClient {
 public:
  // Makes the request of the n-th attempt, from 1 on: signatures and tokens age.
  using Prepare = std::function<HttpRequest(int attempt)>;

  explicit HttpClient(HttpOptions options = {});
  ~HttpClient();
  HttpClient(const HttpClient&) = delete;
  HttpClient& operator=(const HttpClient&) = delete;

  // Sends until an answer is there that another attempt would not change: connections that fail,
  // cut or late bodies, 408, 429, 500, 502, 503 and 504 are tried again until `operation_within` is
  // over. Returns any other status, and the last of these when time is over. `is_again` may ask for
  // one more attempt behind an answer (an expired token, a skewed clock, an error inside of a 200).
  // Redirects are answers: the caller follows them. Nothing is sent twice but as an attempt.
  // Throws what the last attempt failed of, naming URL and method: `timeout` where it took too
  // long, `io` where the connection failed. At once: `unsafe` for plain http and for a certificate
  // that nobody vouches for; `limit` for a body above `most_body`; `corrupt` for more than 200
  // headers or 64 KiB of them, and for an encoded body for `into`. After three such answers:
  // `corrupt` for a body that does not fill `into`. Of a body that tells of an error 64 KiB are
  // kept. Once a stop is requested that the thread heeds (base/parallel.h): `cancelled`, within
  // about a second. While it settles what it has begun, an attempt under way goes on, one that
  // begins has five seconds, and none follows.
  HttpResponse send(const Prepare& prepare,
                    const std::function<bool(const HttpResponse&)>& is_again = {});

  [[nodiscard]] HttpCounts counts() const;
  [[nodiscard]] int most_in_flight() const;  // as in the options
  [[nodiscard]] std::chrono::milliseconds operation_within() const;

 private:
  class Impl;
  [[nodiscard]] Impl& impl() const;

  const HttpOptions options_;
  PerProcess<Impl> impl_;
};

// "METHOD URL: status, request id, what the server says", with no query and no header: what an
// error tells of an answer. Of a body it takes <Code> and <Message> of an error in XML alone, since
// servers repeat tokens and signatures in others.
[[nodiscard]] std::string describe(const HttpRequest& request, const HttpResponse& response);
// The same of a server that may repeat a secret of the URL: each text of its that is not of words
// alone is left out.
[[nodiscard]] std::string describe_in_words(const HttpRequest& request,
                                            const HttpResponse& response);

}  // namespace tessera
