#include "storage/s3/endpoint.h"

#include <algorithm>
#include <ctime>
#include <iomanip>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/text.h"
#include "storage/http/uri.h"
#include "storage/s3/sigv4.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

// Larger bodies go unhashed: their CRC-32 is a signed header, and a second pass costs more than it.
constexpr std::size_t kMostHashed = 64U << 10U;
// How often answers are asked to change that say why they are bad. The client pauses between.
constexpr int kMostRepairs = 8;
constexpr int kMostDigests = 3;
constexpr int kMostStrange = 3;
// AWS says that a Complete may take several minutes, with a blank now and then. Others send none.
constexpr std::chrono::minutes kServerWorks{5};

std::string query_of(const Fields& fields) {
  std::string text;
  for (const auto& [name, value] : fields) {
    text += text.empty() ? "?" : "&";
    text += percent_encoded(name, false) + "=" + percent_encoded(value, false);
  }
  return text;
}

// "Wed, 25 Nov 2026 03:00:00 GMT".
std::optional<std::time_t> parse_http_date(const std::string& text) {
  std::istringstream in(text);
  in.imbue(std::locale::classic());
  std::tm parts{};
  in >> std::get_time(&parts, "%a, %d %b %Y %H:%M:%S");
  if (in.fail()) return std::nullopt;
  return ::timegm(&parts);
}

// AWS has a host a region; other servers have one for all.
std::string endpoint_in(const Settings& settings, const std::string& region) {
  const std::string own = "s3." + settings.region + ".amazonaws.com";
  if (!settings.endpoint.ends_with("://" + own)) return settings.endpoint;
  return settings.endpoint.substr(0, settings.endpoint.size() - own.size()) + "s3." + region +
         ".amazonaws.com";
}

bool is_about_token(std::string_view code) {
  return is_one_of(code, "ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired");
}

// Said with statuses that by themselves would not be tried again, or inside of a 200.
bool is_passing(std::string_view code) {
  return is_one_of(code, "InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout",
                   "ConditionalRequestConflict", "OperationAborted");
}

bool is_good_status(int status) {
  return status >= 200 && status < 300;
}

// A proxy may give the answer to another request. Servers write keys as they are, or encoded.
bool is_about(const std::string& key, const std::string& xml, Document document) {
  try {
    const std::string told = parse_key(xml, document);
    return told.empty() || is_one_of(told, key, percent_encoded(key, true)) ||
           percent_decoded(told) == key;
  } catch (const Error&) {
    return false;
  }
}

bool is_document(const Call& call, const std::string& xml) {
  if (!is_whole(xml, *call.brings)) return false;
  const bool has_key = is_one_of(*call.brings, Document::upload, Document::completed);
  return !has_key || is_about(call.key, xml, *call.brings);
}

std::string field(const Fields& fields, std::string_view name) {
  const auto found = std::ranges::find(fields, name, &Fields::value_type::first);
  return found == fields.end() ? std::string() : found->second;
}

// Bytes of an object are compared with what was asked for by whoever reads them.
bool is_strange(const Call& call, const HttpResponse& response) {
  if (!is_good_status(response.status)) return false;
  if (call.brings) return !is_document(call, response.text());
  if (is_one_of(call.method, "GET", "HEAD")) return false;
  const bool has_text = response.text().find_first_not_of(" \t\r\n") != std::string::npos;
  if (call.method != "PUT") return has_text;
  const std::string told = response.header(kChecksum), sent = field(call.headers, kChecksum);
  const bool is_of_other_bytes = !told.empty() && !sent.empty() && told != sent;
  return has_text || response.header("etag").empty() || is_of_other_bytes;
}

ErrorCode code_for(int status, std::string_view code) {
  if (is_good_status(status) && code.empty()) return ErrorCode::corrupt;
  if (is_one_of(status, 409, 412) || code == "NoSuchUpload") return ErrorCode::conflict;
  if (status == 404) return ErrorCode::not_found;
  if (code == "BadDigest") return ErrorCode::corrupt;
  if (is_one_of(code, "EntityTooLarge", "KeyTooLongError")) return ErrorCode::limit;
  if (status == 501) return ErrorCode::unsupported;
  if (status == 507 || code == "QuotaExceeded") return ErrorCode::out_of_space;
  if (is_one_of(status, 429, 500, 502, 503, 504)) return ErrorCode::timeout;
  return ErrorCode::io;
}

}  // namespace

// What has been done about the answers of one call.
struct Endpoint::Repairs {
  int others = 0, digests = 0, strange = 0;
  bool token = false, clock = false, region = false;
  std::string asked_in = {};  // the region of the last attempt
};

Endpoint::Endpoint(std::string name, Settings settings, std::shared_ptr<HttpClient> client)
    : name_(std::move(name)),
      settings_(std::move(settings)),
      client_(std::move(client)),
      credentials_(settings_.profile, client_),
      region_(settings_.region) {}

std::string Endpoint::region() const {
  const std::lock_guard lock(mutex_);
  return region_;
}

Dialect Endpoint::dialect() const {
  return settings_.is_google ? Dialect::google : Dialect::aws;
}

std::string Endpoint::told(const HttpResponse& response, std::string_view name) const {
  if (!name.starts_with(kVendor)) return response.header(std::string(name));
  return response.header(vendor_header(dialect(), name.substr(kVendor.size())));
}

// Google knows no CRC-32: there the signature has the digest of every body.
Fields Endpoint::headers_of(const Call& call) const {
  if (!settings_.is_google) return call.headers;
  Fields headers;
  for (const auto& [name, value] : call.headers) {
    if (name.starts_with("x-amz-checksum-")) continue;
    const bool is_vendors = name.starts_with(kVendor);
    headers.emplace_back(
        is_vendors ? vendor_header(Dialect::google, name.substr(kVendor.size())) : name, value);
  }
  return headers;
}

HttpRequest Endpoint::made(const Call& call, const std::string& region) const {
  std::string base = endpoint_in(settings_, region);
  if (settings_.is_path_style) {
    base += "/" + settings_.bucket;
  } else {
    base.insert(base.find("://") + 3, settings_.bucket + ".");
  }
  HttpRequest request;
  request.method = call.method;
  request.url = base + "/" + percent_encoded(call.key, true) + query_of(call.query);
  request.headers = headers_of(call);
  if (!call.body.empty()) request.body = {call.body};
  request.into = call.into;
  request.ca_file = settings_.ca_file;
  if (call.is_work) request.works_for = kServerWorks;
  return request;
}

HttpRequest Endpoint::signed_request(const Call& call, const std::string& region) {
  HttpRequest request = made(call, region);
  const auto credentials = credentials_.get();
  if (!credentials) return request;
  const auto now = std::chrono::system_clock::now() + std::chrono::seconds(clock_offset_.load());
  const bool is_hashed = settings_.is_google || call.body.size() <= kMostHashed;
  sign(request, *credentials,
       {.region = region,
        .service = dialect() == Dialect::google ? "storage" : "s3",
        .now = now,
        .dialect = dialect()},
       is_hashed ? sha256_hex(call.body) : std::string(kUnsignedPayload));
  return request;
}

bool Endpoint::has_new_clock(const HttpResponse& response) {
  const auto theirs = parse_http_date(response.header("date"));
  if (!theirs) return false;
  clock_offset_ = *theirs - std::time(nullptr);
  return true;
}

bool Endpoint::has_new_region(const HttpResponse& response, const ServerError& error,
                              const std::string& asked_in) {
  if (!is_one_of(response.status, 301, 307, 400)) return false;
  std::string told = response.header("x-amz-bucket-region");
  if (told.empty()) told = error.region;
  // It becomes a part of the host's name, which a server must not choose.
  if (!is_region(told) || told == asked_in) return false;
  const std::lock_guard lock(mutex_);
  region_ = told;
  return true;
}

bool Endpoint::is_again(const Call& call, const HttpResponse& response, Repairs& repairs) {
  const bool is_no_answer = is_strange(call, response);
  if (is_good_status(response.status) && !is_no_answer) return false;
  const ServerError error = parse_error(response.text());
  if (error.code == "BadDigest") return ++repairs.digests < kMostDigests;
  if (is_about_token(error.code) && !std::exchange(repairs.token, true)) {
    credentials_.drop();
    return true;
  }
  if (error.code == "RequestTimeTooSkewed" && !std::exchange(repairs.clock, true))
    return has_new_clock(response);
  if (has_new_region(response, error, repairs.asked_in))
    return !std::exchange(repairs.region, true);
  if (is_no_answer && error.code.empty()) return ++repairs.strange < kMostStrange;
  return is_passing(error.code) && ++repairs.others < kMostRepairs;
}

// An answer to HEAD has no body, in which a server says why it refuses. A GET's has one, by which
// token and clock are mended.
Answer Endpoint::send(const Call& call) {
  const auto is_refused = [](const Answer& answer) {
    return is_one_of(answer.response.status, 400, 401, 403);
  };
  Answer answer = send_by_itself(call);
  if (call.method != "HEAD" || !is_refused(answer)) return answer;
  const Call first_byte{.method = "GET", .key = call.key, .headers = {{"Range", "bytes=0-0"}}};
  Answer reason = send_by_itself(first_byte);
  return is_refused(reason) ? reason : send_by_itself(call);
}

Answer Endpoint::send_by_itself(const Call& call) {
  Repairs repairs;
  const auto prepare = [&](int) {
    repairs.asked_in = region();
    return signed_request(call, repairs.asked_in);
  };
  const auto again = [&](const HttpResponse& response) {
    return is_again(call, response, repairs);
  };
  Answer answer{client_->send(prepare, again), {}};
  answer.is_strange = is_strange(call, answer.response);
  if (answer.is_strange || !is_good_status(answer.response.status))
    answer.error = parse_error(answer.response.text());
  return answer;
}

Answer Endpoint::require_good(const Call& call, Answer answer) const {
  if (answer.is_good()) return answer;
  const int status = answer.response.status;
  std::string text = describe_answer(call, answer);
  if (status == 403) {
    text += "; the credentials need " + std::string(call.permission);
    // Who may not list is told 403 where there is nothing.
    if (call.method == "HEAD") text += ", and s3:ListBucket to be told that an object is absent";
  }
  if (answer.is_strange && answer.error.code.empty()) {
    text += "; its body of " + std::to_string(answer.response.body.size()) +
            " bytes is no answer of S3 to that: a proxy gave it, or it was cut";
  }
  if (answer.error.code == "BadDigest") {
    text += "; " + std::to_string(kMostDigests) +
            " times it got other bytes than were summed here: the memory of this host or the"
            " network damages them";
  }
  throw Error(code_for(status, answer.error.code), text)
      .at_path(call.key.empty() ? name_ : path_of(call.key));
}

}  // namespace tessera::s3
