#include "storage/http/client.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <mutex>
#include <optional>
#include <thread>

#include "base/log.h"
#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "storage/http/limiter.h"
#include "storage/http/transfer.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr milliseconds kLookForStop{50};

// A body of the wrong length so often is the server's opinion, no accident.
constexpr int kMostMisfits = 3;

// The server is busy: fewer requests at once help it.
bool is_busy(int status) {
  return is_one_of(status, 429, 503);
}
// It may do better next time.
bool is_passing(int status) {
  return is_busy(status) || is_one_of(status, 408, 500, 502, 504);
}

// A number from 1 to a million. Unset, or empty: none.
std::optional<int> number_in(const char* variable) {
  const std::string text = environment_variable(variable).value_or(std::string());
  if (text.empty()) return std::nullopt;
  int number = 0;
  const char* end = text.data() + text.size();
  const auto parsed = std::from_chars(text.data(), end, number);
  if (parsed.ec == std::errc() && parsed.ptr == end && number >= 1 && number <= 1'000'000)
    return number;
  throw Error(ErrorCode::invalid_argument,
              std::string(variable) + " is '" + text + "', expected a number from 1 on");
}

HttpOptions with_environment(HttpOptions options) {
  if (const auto requests = number_in("TESSERA_HTTP_REQUESTS")) options.most_in_flight = *requests;
  if (const auto stall = number_in("TESSERA_HTTP_STALL"))
    options.slow_for = std::chrono::seconds(*stall);
  if (const auto deadline = number_in("TESSERA_HTTP_DEADLINE"))
    options.operation_within = std::chrono::seconds(*deadline);
  if (environment_variable("TESSERA_ALLOW_HTTP") == "1") options.allow_http = true;
  if (options.ca_file.empty())
    options.ca_file = environment_variable("TESSERA_CA_FILE").value_or(std::string());
  if (options.most_in_flight < 1)
    throw Error(ErrorCode::invalid_argument, "at least one request has to be in flight");
  return options;
}

void require_no_stop() {
  if (HeedStop::is_requested() && !Settling::is_under_way()) throw_cancelled();
}

void require_sendable(const HttpRequest& request, bool allow_http) {
  const auto is_of_url = [](char c) { return c > 0x20 && c < 0x7f; };
  const std::string path(without_query(request.url));
  if (!std::ranges::all_of(request.url, is_of_url)) {
    throw Error(ErrorCode::invalid_argument, "a URL has characters that are not percent-encoded")
        .at_path(path);
  }
  const Uri uri = parse_uri(request.url);
  if (uri.scheme == "https") return;
  if (uri.scheme != "http")
    throw Error(ErrorCode::unsupported, "no scheme of HTTP: '" + uri.scheme + "'").at_path(path);
  if (allow_http || is_loopback(uri.host)) return;
  throw Error(ErrorCode::unsafe,
              "plain http shows data and credentials to everyone on the way: use https, or allow it"
              " by TESSERA_ALLOW_HTTP=1")
      .at_path(path);
}

// The seconds until more is allowed: of a limit by the draft of IETF, `"api";r=0;t=55`, from which
// nothing remains. "": there is none.
std::string reset_of_limit(std::string_view header) {
  std::string remaining, reset;
  for (std::size_t at = header.find(';'); at != std::string_view::npos; at = header.find(';')) {
    header.remove_prefix(at + 1);
    while (header.starts_with(' ')) header.remove_prefix(1);
    const std::string_view value = header.substr(0, header.find_first_of(";, "));
    if (value.starts_with("r=")) remaining = value.substr(2);
    if (value.starts_with("t=")) reset = value.substr(2);
  }
  return remaining == "0" ? reset : "";
}

// A wait that the server asks for, in seconds; dates, which need its clock, are left alone.
milliseconds asked_pause(const HttpResponse& response) {
  std::string text = response.header("retry-after");
  if (text.empty() && response.status == 429) text = reset_of_limit(response.header("ratelimit"));
  unsigned int seconds = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (error != std::errc() || end != text.data() + text.size()) return milliseconds(0);
  return std::min<milliseconds>(std::chrono::seconds(seconds), Backoff::kLongest);
}

// Handles that nobody uses now, the last used on top: its connection is the least likely to have
// been closed meanwhile.
class TransferPool {
 public:
  std::unique_ptr<Transfer> take() {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto transfer = std::move(idle_.back());
        idle_.pop_back();
        return transfer;
      }
    }
    return std::make_unique<Transfer>();
  }
  void give_back(std::unique_ptr<Transfer> transfer) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(transfer));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Transfer>> idle_;  // guarded by mutex_
};

struct Counters {
  std::atomic<std::uint64_t> requests{0}, retries{0};
  std::atomic<std::uint64_t> bytes_sent{0}, bytes_received{0}, bytes_again{0};
};

// One call of send(): what its attempts have in common.
struct Operation {
  explicit Operation(milliseconds first_pause) : backoff(first_pause) {}

  Backoff backoff;
  std::optional<Clock::time_point> until;  // from the first attempt on, not while that waits
  int attempts = 0;
  int misfits = 0;     // bodies that did not fill `into`
  int unanswered = 0;  // attempts, the last ones, where nobody listened

  [[nodiscard]] milliseconds left() const {
    return std::max(std::chrono::duration_cast<milliseconds>(*until - Clock::now()),
                    milliseconds(0));
  }
};

}  // namespace

class HttpClient::Impl {
 public:
  explicit Impl(const HttpOptions& options)
      : options_(options), limiter_(options_.most_in_flight) {}

  HttpResponse send(const Prepare& prepare,
                    const std::function<bool(const HttpResponse&)>& is_again) {
    Operation operation(options_.first_pause);
    while (true) {
      // Outside of the limiter: it may send requests of its own, for credentials.
      const HttpRequest request = prepare(++operation.attempts);
      require_sendable(request, options_.allow_http);
      require_no_stop();
      Attempt attempt = attempt_once(request, operation);
      attempt.response.attempts = operation.attempts;
      const bool is_done = attempt.failure.empty() && !is_passing(attempt.response.status) &&
                           !(is_again && is_again(attempt.response));
      count(attempt, operation, is_done);
      if (is_done || is_hopeless(attempt, operation) || !pause(attempt, operation))
        return answer_of(request, std::move(attempt));
    }
  }

  [[nodiscard]] HttpCounts counts() const {
    return {counters_.requests, counters_.retries, counters_.bytes_sent, counters_.bytes_received,
            counters_.bytes_again};
  }

 private:
  Attempt attempt_once(const HttpRequest& request, Operation& operation) {
    Limiter::Place place(limiter_);
    if (!operation.until) operation.until = Clock::now() + options_.operation_within;
    auto transfer = transfers_.take();
    const milliseconds within =
        HeedStop::is_requested() ? std::min(operation.left(), Settling::kWithin) : operation.left();
    Attempt attempt = transfer->attempt(request, options_, std::max(within, milliseconds(1)));
    // Whatever failed, a new handle has no part of it: libcurl 7.88 keeps buffers of a host that
    // did not resolve, and refuses options then.
    if (attempt.failure.empty()) transfers_.give_back(std::move(transfer));
    if (is_busy(attempt.response.status)) {
      place.was_busy();
    } else if (attempt.failure.empty()) {
      place.went_well();
    }
    return attempt;
  }

  void count(const Attempt& attempt, const Operation& operation, bool is_done) {
    ++counters_.requests;
    if (operation.attempts > 1) ++counters_.retries;
    counters_.bytes_sent += attempt.sent;
    counters_.bytes_received += attempt.received;
    const std::uint64_t again = is_done ? 0 : attempt.sent + attempt.received;
    counters_.bytes_again += again;
    TrafficCount::add(
        {.requests = 1, .retries = operation.attempts > 1 ? 1U : 0U, .bytes_again = again});
  }

  [[nodiscard]] bool is_hopeless(const Attempt& attempt, Operation& operation) const {
    operation.unanswered = attempt.is_connected ? 0 : operation.unanswered + 1;
    if (attempt.failure.empty()) return false;
    if (operation.unanswered == options_.most_unanswered) return true;
    if (attempt.code == ErrorCode::corrupt && ++operation.misfits == kMostMisfits) return true;
    return attempt.is_final;
  }

  // False: the time would be over before another attempt.
  static bool pause(const Attempt& attempt, Operation& operation) {
    if (attempt.is_stale) return operation.left() > milliseconds(0);
    const milliseconds pause = std::max(operation.backoff.next(), asked_pause(attempt.response));
    if (pause >= operation.left()) return false;
    const auto end = Clock::now() + pause;
    for (auto now = Clock::now(); now < end; now = Clock::now()) {
      if (HeedStop::is_requested()) break;
      std::this_thread::sleep_for(std::min<Clock::duration>(end - now, kLookForStop));
    }
    return !(Settling::is_under_way() && HeedStop::is_requested());
  }

  static HttpResponse answer_of(const HttpRequest& request, Attempt attempt) {
    if (attempt.failure.empty()) return std::move(attempt.response);
    const int attempts = attempt.response.attempts;
    throw Error(attempt.code, request.method + ": " + attempt.failure + ", after " +
                                  std::to_string(attempts) +
                                  (attempts == 1 ? " attempt" : " attempts"))
        .at_path(std::string(without_query(request.url)));
  }

  const HttpOptions options_;
  Limiter limiter_;
  TransferPool transfers_;
  Counters counters_;
};

HttpClient::HttpClient(HttpOptions options) : options_(with_environment(std::move(options))) {}
HttpClient::~HttpClient() = default;

HttpClient::Impl& HttpClient::impl() const {
  return impl_.get([this] { return std::make_unique<Impl>(options_); });
}

HttpResponse HttpClient::send(const Prepare& prepare,
                              const std::function<bool(const HttpResponse&)>& is_again) {
  return impl().send(prepare, is_again);
}

HttpCounts HttpClient::counts() const {
  return impl().counts();
}
int HttpClient::most_in_flight() const {
  return options_.most_in_flight;
}
milliseconds HttpClient::operation_within() const {
  return options_.operation_within;
}

}  // namespace tessera
