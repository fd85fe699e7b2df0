#include "storage/s3/answers.h"

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>
#include <pugixml.hpp>

#include "base/one_of.h"
#include "tessera/error.h"

namespace tessera::s3 {
namespace {

using Json = nlohmann::json;
using std::chrono::seconds;
using std::chrono::system_clock;

[[noreturn]] void refuse_time() {
  throw Error(ErrorCode::corrupt, "credentials with an Expiration that is no time");
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Of "Z", "+01:00", "-0130" or nothing.
seconds offset_of(std::string_view zone) {
  if (zone.empty() || zone == "Z") return seconds(0);
  std::string digits(zone.substr(1));
  std::erase(digits, ':');
  if (!is_one_of(zone[0], '+', '-') || digits.size() != 4 || !std::ranges::all_of(digits, is_digit))
    refuse_time();
  const int number = std::stoi(digits);
  const seconds ahead((number / 100 * 60 + number % 100) * 60);
  return zone[0] == '+' ? ahead : -ahead;
}

// None: it is absent or null.
std::optional<std::string> text_in(const Json& json, const char* name, const std::string& from) {
  const auto found = json.find(name);
  if (found == json.end() || found->is_null()) return std::nullopt;
  if (!found->is_string())
    refuse_credentials(from, "in the answer " + std::string(name) + " is no text");
  return found->get<std::string>();
}

std::string needed_in(const Json& json, const char* name, const std::string& from) {
  auto text = text_in(json, name, from);
  if (!text || text->empty()) refuse_credentials(from, "the answer has no " + std::string(name));
  return *std::move(text);
}

}  // namespace

void refuse_credentials(const std::string& from, const std::string& why) {
  throw Error(ErrorCode::io, "credentials of " + from + ": " + why);
}

system_clock::time_point parse_time(const std::string& text) {
  std::tm time{};
  const char* const end = ::strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &time);
  if (end == nullptr) refuse_time();
  std::string_view zone(end);
  if (zone.starts_with('.')) {
    const std::size_t digits = std::min(zone.find_first_not_of("0123456789", 1), zone.size());
    if (digits == 1) refuse_time();
    zone.remove_prefix(digits);
  }
  const seconds since = seconds(::timegm(&time)) - offset_of(zone);
  // "Never" is often year 9999, and a clock of nanoseconds ends in 2262.
  const auto first = std::chrono::ceil<seconds>(system_clock::time_point::min().time_since_epoch());
  const auto last = std::chrono::floor<seconds>(system_clock::time_point::max().time_since_epoch());
  return system_clock::time_point(std::clamp(since, first, last));
}

Credentials credentials_of_json(std::string_view text, const char* token, const std::string& from) {
  const Json json = Json::parse(text, nullptr, false);
  if (!json.is_object()) refuse_credentials(from, "the answer is no JSON object");
  Credentials found{.key_id = needed_in(json, "AccessKeyId", from),
                    .secret = needed_in(json, "SecretAccessKey", from),
                    .token = text_in(json, token, from).value_or("")};
  if (const auto expires = text_in(json, "Expiration", from)) found.expires = parse_time(*expires);
  return found;
}

Credentials credentials_of_xml(std::string_view text, const std::string& action,
                               const std::string& from) {
  pugi::xml_document document;
  if (!document.load_buffer(text.data(), text.size())) refuse_credentials(from, "no XML came back");
  const pugi::xml_node node = document.child((action + "Response").c_str())
                                  .child((action + "Result").c_str())
                                  .child("Credentials");
  const auto needed = [&](const char* name) {
    std::string value = node.child(name).text().get();
    if (value.empty()) refuse_credentials(from, "the answer has no " + std::string(name));
    return value;
  };
  return {.key_id = needed("AccessKeyId"),
          .secret = needed("SecretAccessKey"),
          .token = needed("SessionToken"),
          .expires = parse_time(needed("Expiration"))};
}

}  // namespace tessera::s3
