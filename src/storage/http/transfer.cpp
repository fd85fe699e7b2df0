#include "storage/http/transfer.h"

#include <algorithm>
#include <chrono>
#include <initializer_list>
#include <new>
#include <optional>
#include <utility>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "storage/http/reply.h"
#include "storage/http/shared_library.h"
#include "storage/http/uri.h"
#include "tessera/library.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

// A quarter of what one request usually moves, and 16 handles stay below 8 MiB.
constexpr long kBufferBytes = 256L << 10U;

using Clock = std::chrono::steady_clock;

// What libcurl's callbacks work on.
struct Exchange {
  Upload upload;
  Reply reply;
  milliseconds silent_for{0};  // at most; 0: libcurl looks at the rate
  bool is_begun = false;
  bool is_begun_again = false;
  bool is_cut = false;     // somebody asked for an end, and that has lasted long enough
  bool is_silent = false;  // nothing has moved for too long
  curl_off_t moved = 0;
  Clock::time_point moved_at = Clock::now();
  std::optional<Clock::time_point> stopped_at = {};  // when somebody's wish for an end was seen
};

std::size_t give_body(char* to, std::size_t size, std::size_t count, void* exchange) {
  return static_cast<Exchange*>(exchange)->upload.read(
      {reinterpret_cast<std::byte*>(to), size * count});
}

std::size_t take_header(char* from, std::size_t size, std::size_t count, void* exchange) {
  const bool is_wanted = static_cast<Exchange*>(exchange)->reply.take_header({from, size * count});
  return is_wanted ? size * count : 0;
}

std::size_t take_body(char* from, std::size_t size, std::size_t count, void* exchange) {
  const bool is_wanted = static_cast<Exchange*>(exchange)->reply.take_body(
      {reinterpret_cast<const std::byte*>(from), size * count});
  return is_wanted ? size * count : 0;
}

// libcurl silently sends a request again if a connection that it kept turns out to be closed. The
// server may have acted on the first one, so that is an attempt, which callers have to know of.
int begin(void* exchange, char* /*ip*/, char* /*own_ip*/, int /*port*/, int /*own_port*/) {
  auto& state = *static_cast<Exchange*>(exchange);
  state.is_begun_again = std::exchange(state.is_begun, true);
  return state.is_begun_again ? CURL_PREREQFUNC_ABORT : CURL_PREREQFUNC_OK;
}

// The first that is set and not empty; else empty.
std::string first_of(std::initializer_list<std::string_view> names) {
  const auto all = variables();
  for (const std::string_view name : names) {
    std::string value = variable_of(*all, name).value_or(std::string());
    if (!value.empty()) return value;
  }
  return {};
}

// As libcurl chooses one, which would ask getenv() while a request begins. It leaves out
// HTTP_PROXY, which whoever calls a program by CGI can set.
std::string proxy_of(const std::string& url) {
  if (url.starts_with("https")) {
    return first_of({"https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"});
  }
  return first_of({"http_proxy", "all_proxy", "ALL_PROXY"});
}

// About once a second, and whenever something moves.
int look(void* of, curl_off_t /*all*/, curl_off_t received, curl_off_t /*all*/, curl_off_t sent) {
  auto& exchange = *static_cast<Exchange*>(of);
  const curl_off_t moved = received + sent;
  if (moved != std::exchange(exchange.moved, moved)) exchange.moved_at = Clock::now();
  if (HeedStop::is_requested() && !exchange.stopped_at) exchange.stopped_at = Clock::now();
  const auto patience = Settling::is_under_way() ? Settling::kWithin : milliseconds(0);
  exchange.is_cut = exchange.stopped_at && Clock::now() - *exchange.stopped_at >= patience;
  exchange.is_silent = exchange.silent_for > milliseconds(0) &&
                       Clock::now() - exchange.moved_at > exchange.silent_for;
  return exchange.is_cut || exchange.is_silent ? 1 : 0;
}

void require_no_line_break(const std::string& text) {
  if (text.find_first_of(std::string_view("\r\n\0", 3)) == std::string::npos) return;
  throw Error(ErrorCode::invalid_argument, "a header of a request has a line break");
}

// The headers of a request as libcurl wants them.
class HeaderList {
 public:
  explicit HeaderList(const CurlLibrary& curl) : curl_(curl) {}
  ~HeaderList() { curl_.slist_free_all(list_); }
  HeaderList(const HeaderList&) = delete;
  HeaderList& operator=(const HeaderList&) = delete;

  void add(const std::string& line) {
    curl_slist* longer = curl_.slist_append(list_, line.c_str());
    if (longer == nullptr) throw std::bad_alloc();
    list_ = longer;
  }
  void add(const std::string& name, const std::string& value) {
    require_no_line_break(name + value);
    add(value.empty() ? name + ";" : name + ": " + value);  // "NAME:" would take it away
  }
  [[nodiscard]] curl_slist* get() const { return list_; }

 private:
  const CurlLibrary& curl_;
  curl_slist* list_ = nullptr;
};

bool is_refused_peer(CURLcode code) {
  return is_one_of(code, CURLE_PEER_FAILED_VERIFICATION, CURLE_SSL_ISSUER_ERROR);
}

// No attempt can change what these are about.
bool is_final(CURLcode code) {
  return is_refused_peer(code) ||
         is_one_of(code, CURLE_UNSUPPORTED_PROTOCOL, CURLE_URL_MALFORMAT, CURLE_NOT_BUILT_IN,
                   CURLE_BAD_FUNCTION_ARGUMENT, CURLE_SSL_CACERT_BADFILE, CURLE_SSL_CERTPROBLEM,
                   CURLE_SSL_CIPHER, CURLE_SSL_ENGINE_NOTFOUND);
}

ErrorCode code_of_failure(CURLcode code) {
  if (code == CURLE_OPERATION_TIMEDOUT) return ErrorCode::timeout;
  return is_refused_peer(code) ? ErrorCode::unsafe : ErrorCode::io;
}

long rounded_up_to_seconds(milliseconds time) {
  return (time.count() + 999) / 1000;
}

}  // namespace

class Transfer::Handle {
 public:
  Handle() : curl_(curl_library()), easy_(curl_.easy_init()) {
    if (easy_ == nullptr) throw std::bad_alloc();
  }
  ~Handle() { curl_.easy_cleanup(easy_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  Attempt attempt(const HttpRequest& request, const HttpOptions& options, milliseconds whole) {
    curl_.easy_reset(easy_);  // connections stay
    Exchange exchange{Upload(request.body), Reply(request)};
    HeaderList headers(curl_);
    headers.add("Expect:");  // no round trip before a body: whoever refuses it closes
    for (const auto& [name, value] : request.headers) headers.add(name, value);
    set(CURLOPT_HTTPHEADER, headers.get());
    set_method(request, exchange.upload);
    set_callbacks(exchange);
    set_safety(request, options);
    set_patience(request, options, whole, exchange);
    error_[0] = '\0';
    set(CURLOPT_ERRORBUFFER, error_);
    const CURLcode code = curl_.easy_perform(easy_);
    return attempt_of(code, exchange);
  }

 private:
  template <typename Value>
  void set(CURLoption option, Value value) {
    const CURLcode code = curl_.easy_setopt(easy_, option, value);
    if (code == CURLE_OUT_OF_MEMORY) throw std::bad_alloc();
    if (code == CURLE_OK) return;
    throw Error(ErrorCode::unsupported, "libcurl refuses its option " + std::to_string(option) +
                                            ": " + curl_.easy_strerror(code));
  }

  void set_method(const HttpRequest& request, const Upload& upload) {
    set(CURLOPT_URL, request.url.c_str());
    set(CURLOPT_PATH_AS_IS, 1L);  // as it was signed
    set(CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    set(CURLOPT_USERAGENT, "tessera/" TESSERA_VERSION_STRING);
    set(CURLOPT_FOLLOWLOCATION, 0L);
    if (request.method == "HEAD") {
      set(CURLOPT_NOBODY, 1L);
    } else if (upload.size() != 0 || is_one_of(request.method, "PUT", "POST")) {
      set(CURLOPT_UPLOAD, 1L);
      set(CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(upload.size()));
      set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
    } else if (request.method != "GET") {
      set(CURLOPT_CUSTOMREQUEST, request.method.c_str());
    }
  }

  void set_callbacks(Exchange& exchange) {
    set(CURLOPT_READFUNCTION, &give_body);
    set(CURLOPT_READDATA, &exchange);
    set(CURLOPT_HEADERFUNCTION, &take_header);
    set(CURLOPT_HEADERDATA, &exchange);
    set(CURLOPT_WRITEFUNCTION, &take_body);
    set(CURLOPT_WRITEDATA, &exchange);
    set(CURLOPT_PREREQFUNCTION, &begin);
    set(CURLOPT_PREREQDATA, &exchange);
    set(CURLOPT_BUFFERSIZE, kBufferBytes);
    set(CURLOPT_UPLOAD_BUFFERSIZE, kBufferBytes);
  }

  void set_safety(const HttpRequest& request, const HttpOptions& options) {
    set(CURLOPT_NOSIGNAL, 1L);
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_SSL_VERIFYPEER, 1L);
    set(CURLOPT_SSL_VERIFYHOST, 2L);
    set(CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
    const std::string& ca_file = options.ca_file.empty() ? request.ca_file : options.ca_file;
    if (!ca_file.empty()) set(CURLOPT_CAINFO, ca_file.c_str());
    set(CURLOPT_SUPPRESS_CONNECT_HEADERS, 1L);  // a proxy's answer is not the server's
    // A proxy's loopback is another machine. What is set here, libcurl does not look for.
    const bool is_direct = !options.allow_proxy || is_loopback_url(request.url);
    set(CURLOPT_PROXY, is_direct ? "" : proxy_of(request.url).c_str());
    set(CURLOPT_NOPROXY, first_of({"no_proxy", "NO_PROXY"}).c_str());
  }

  void set_patience(const HttpRequest& request, const HttpOptions& options, milliseconds whole,
                    Exchange& exchange) {
    const milliseconds connect = std::clamp(options.connect_within, milliseconds(1), whole);
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(connect.count()));
    set(CURLOPT_TIMEOUT_MS, static_cast<long>(whole.count()));
    if (request.works_for > std::chrono::seconds(0)) {
      exchange.silent_for = std::max(options.slow_for, request.works_for);
    } else {
      set(CURLOPT_LOW_SPEED_LIMIT, static_cast<long>(options.least_rate));
      set(CURLOPT_LOW_SPEED_TIME, rounded_up_to_seconds(options.slow_for));
    }
    set(CURLOPT_NOPROGRESS, 0L);
    set(CURLOPT_XFERINFOFUNCTION, &look);
    set(CURLOPT_XFERINFODATA, &exchange);
    set(CURLOPT_TCP_KEEPALIVE, 1L);
  }

  Attempt attempt_of(CURLcode code, Exchange& exchange) const {
    if (code == CURLE_OUT_OF_MEMORY) throw std::bad_alloc();
    if (code == CURLE_ABORTED_BY_CALLBACK && exchange.is_cut) throw_cancelled();
    Reply& reply = exchange.reply;
    reply.require_acceptable();
    Attempt attempt;
    attempt.sent = exchange.upload.sent();
    attempt.received = reply.received();
    attempt.is_connected = exchange.is_begun;
    // CURLE_WRITE_ERROR: the reply wanted no more, since it has enough or since nothing can fit.
    if (code == CURLE_OK || code == CURLE_WRITE_ERROR) {
      attempt.failure = reply.misfit();
      attempt.code = ErrorCode::corrupt;
    } else if (code == CURLE_ABORTED_BY_CALLBACK && exchange.is_silent) {
      attempt.failure = "the server sent nothing for " +
                        std::to_string(rounded_up_to_seconds(exchange.silent_for)) + " s";
      attempt.code = ErrorCode::timeout;
    } else if (exchange.is_begun_again || code == CURLE_SEND_FAIL_REWIND) {
      attempt.failure = "the connection was closed before the answer";
      attempt.is_stale = true;
    } else {
      attempt.failure = error_[0] != '\0' ? error_ : curl_.easy_strerror(code);
      attempt.code = code_of_failure(code);
      attempt.is_final = is_final(code);
    }
    attempt.response = std::move(reply.response());
    return attempt;
  }

  const CurlLibrary& curl_;
  CURL* easy_;
  char error_[CURL_ERROR_SIZE] = {};
};

Transfer::Transfer() : handle_(std::make_unique<Handle>()) {}
Transfer::~Transfer() = default;

Attempt Transfer::attempt(const HttpRequest& request, const HttpOptions& options,
                          milliseconds whole) {
  return handle_->attempt(request, options, whole);
}

}  // namespace tessera
