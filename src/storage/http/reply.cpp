#include "storage/http/reply.h"

#include <algorithm>
#include <charconv>
#include <cstring>
#include <optional>

#include "base/text.h"
#include "storage/http/client.h"
#include "storage/http/uri.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// S3 answers with some 20 headers of 1 KiB together.
constexpr std::size_t kMostHeadBytes = 64U << 10U;
constexpr std::size_t kMostHeadLines = 200;
// The most bytes that are taken of a body that tells of an error.
constexpr std::size_t kMostErrorBody = 64U << 10U;

bool is_blank(char c) {
  return c == ' ' || c == '\t' || c == '\r' || c == '\n';
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_blank(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_blank(text.back())) text.remove_suffix(1);
  return text;
}

template <typename Number>
std::optional<Number> parse_number(std::string_view text) {
  Number number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

// The bytes are the object's own. "aws-chunked" is how they were uploaded, which some servers tell.
bool is_plain_encoding(std::string_view codings) {
  while (!codings.empty()) {
    const std::size_t end = std::min(codings.find(','), codings.size());
    const std::string coding = lowered(trimmed(codings.substr(0, end)));
    if (!is_one_of(coding, "", "identity", "aws-chunked")) return false;
    codings.remove_prefix(std::min(end + 1, codings.size()));
  }
  return true;
}

}  // namespace

std::string Reply::path() const {
  return std::string(without_query(request_.url));
}

bool Reply::goes_into() const {
  return !request_.into.empty() && is_one_of(response_.status, 200, 206);
}

bool Reply::take_header(std::string_view line) noexcept {
  try {
    head_bytes_ += line.size();
    if (++head_lines_ > kMostHeadLines || head_bytes_ > kMostHeadBytes)
      throw Error(ErrorCode::corrupt, "the answer has more headers than any server needs")
          .at_path(path());
    // An interim answer (100) has a head of its own, and trailers come behind the body.
    if (response_.status < 200 && line.starts_with("HTTP/")) {
      begin(line);
    } else if (trimmed(line).empty()) {
      return end_head();
    } else if (!is_head_over_) {
      add_header(line);
    }
    return true;
  } catch (...) {  // libcurl is C
    refusal_ = std::current_exception();
    return false;
  }
}

// "HTTP/1.1 404 Not Found".
void Reply::begin(std::string_view status_line) {
  response_.headers.clear();
  is_head_over_ = false;
  const std::size_t space = std::min(status_line.find(' '), status_line.size());
  const std::string_view rest = trimmed(status_line.substr(space));
  response_.status = parse_number<int>(rest.substr(0, 3)).value_or(0);
  response_.reason = rest.size() > 4 ? trimmed(rest.substr(4)) : std::string_view();
}

void Reply::add_header(std::string_view line) {
  const std::size_t colon = line.find(':');
  if (colon == std::string_view::npos) return;
  const std::string name = lowered(trimmed(line.substr(0, colon)));
  const std::string_view value = trimmed(line.substr(colon + 1));
  std::string& kept = response_.headers[name];
  if (name == "content-length" && !kept.empty() && kept != value)
    throw Error(ErrorCode::corrupt, "the answer has two lengths").at_path(path());
  // Lists may come in several headers; of another name that does, the last one counts.
  const bool goes_on = !kept.empty() && is_one_of(name, "link", "content-encoding");
  kept = (goes_on ? kept + ", " : std::string()).append(value);
}

bool Reply::end_head() {
  is_head_over_ = true;
  if (!goes_into()) return true;
  if (!is_plain_encoding(response_.header("content-encoding"))) {
    throw Error(ErrorCode::corrupt, "the body is encoded, although nobody asked for that")
        .at_path(path());
  }
  const auto length = parse_number<std::uint64_t>(response_.header("content-length"));
  if (!length || *length == request_.into.size()) return true;
  promised_ = *length;
  return *length == 0;  // nothing comes that could be stopped
}

bool Reply::take_body(ByteView bytes) noexcept {
  try {
    received_ += bytes.size();
    return keep(bytes);
  } catch (...) {
    refusal_ = std::current_exception();
    return false;
  }
}

bool Reply::keep(ByteView bytes) {
  const std::uint64_t before = received_ - bytes.size();
  if (goes_into()) {
    if (received_ > request_.into.size()) {
      promised_ = received_;
      return false;
    }
    request_.into.write(before, bytes);
    return true;
  }
  const bool is_error = response_.status >= 300;
  if (is_error && received_ > kMostErrorBody) return false;
  if (!is_error && received_ > request_.most_body) {
    throw Error(ErrorCode::limit, "the answer has more than the " +
                                      std::to_string(request_.most_body) + " bytes expected here")
        .at_path(path());
  }
  response_.body.insert(response_.body.end(), bytes.begin(), bytes.end());
  return true;
}

std::string Reply::misfit() const {
  const std::uint64_t found = std::max(received_, promised_);
  if (!goes_into() || (found == request_.into.size() && promised_ == 0)) return {};
  return "the answer " + std::to_string(response_.status) + " has " +
         (received_ > request_.into.size() ? "at least " : "") + std::to_string(found) +
         " bytes, expected " + std::to_string(request_.into.size());
}

namespace {

// The most bytes of a reason, message or id in an error.
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

namespace {

// Neither signatures nor tokens nor addresses are.
bool is_of_words(std::string_view text) {
  constexpr std::size_t kLongestWord = 32;
  std::size_t word = 0;
  return std::ranges::all_of(text, [&](char c) {
    const bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    word = is_letter ? word + 1 : 0;
    return word <= kLongestWord && (is_letter || is_one_of(c, ' ', '.', ',', ';', '-', '\''));
  });
}

// `is_told`: of the texts of the server.
template <typename IsTold>
std::string described(const HttpRequest& request, const HttpResponse& response, IsTold is_told) {
  const auto told = [&](std::string text) { return is_told(text) ? text : std::string(); };
  std::string line = request.method + " " + std::string(without_query(request.url)) + ": " +
                     std::to_string(response.status);
  const std::string reason = told(printable(response.reason)), id = told(request_id(response));
  if (!reason.empty()) line += " " + reason;
  if (!id.empty()) line += ", request id " + id;
  const std::string text = response.text();
  const std::string code = told(element(text, "Code")), message = told(element(text, "Message"));
  if (!code.empty()) line += ", " + code;
  if (!message.empty()) line += ": " + message;
  return line;
}

}  // namespace

std::string describe(const HttpRequest& request, const HttpResponse& response) {
  return described(request, response, [](std::string_view) { return true; });
}

std::string describe_in_words(const HttpRequest& request, const HttpResponse& response) {
  return described(request, response, is_of_words);
}

}  // namespace tessera
