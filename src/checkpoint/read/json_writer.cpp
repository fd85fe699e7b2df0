#include "checkpoint/read/json_writer.h"

#include <cstddef>
#include <string_view>

#include <nlohmann/json.hpp>

#include "tessera/error.h"
#include "value/render.h"

namespace tessera {

using Json = nlohmann::json;

namespace {

// The end of the string that begins at `at`.
std::size_t end_of_string(std::string_view json, std::size_t at) {
  for (++at; at < json.size() && json[at] != '"'; ++at)
    if (json[at] == '\\') ++at;
  return at + 1;
}

}  // namespace

// Text ends with a quotation mark, so that these characters are always JSON's own.
void JsonWriter::separate() {
  constexpr std::string_view kBefore = "{[:";
  if (!json_.empty() && kBefore.find(json_.back()) == std::string_view::npos) json_ += ',';
}

void JsonWriter::begin(char bracket) {
  separate();
  json_ += bracket;
}

void JsonWriter::key(std::string_view plain) {
  separate();
  json_.append("\"").append(plain).append("\":");
}

void JsonWriter::name(const std::string& text) {
  this->text(text);
  json_ += ':';
}

// Values of the library that are no containers need no memory to be destroyed.
void JsonWriter::text(const std::string& text) {
  const bool is_refused = bad_text_ == BadText::refuse;
  const auto handler = is_refused ? Json::error_handler_t::strict : Json::error_handler_t::replace;
  try {
    raw(Json(text).dump(-1, ' ', beyond_ascii_ == BeyondAscii::escaped, handler));
  } catch (const Json::exception&) {
    throw Error(ErrorCode::unsupported, "a name or text is not UTF-8: " + printable(text));
  }
}

void JsonWriter::integer(std::int64_t number) {
  raw(std::to_string(number));
}

void JsonWriter::real(double finite) {
  raw(Json(finite).dump());
}

void JsonWriter::raw(std::string_view json) {
  separate();
  json_ += json;
}

std::string json_in_lines(std::string_view json) {
  std::string lines;
  lines.reserve(json.size() * 2);
  std::size_t depth = 0;
  const auto begin_line = [&] { lines.append("\n").append(depth, ' '); };
  for (std::size_t at = 0; at < json.size();) {
    const char mark = json[at];
    if (mark == '"') {
      const std::size_t end = end_of_string(json, at);
      lines.append(json.substr(at, end - at));
      at = end;
      continue;
    }
    const bool is_end = mark == '}' || mark == ']';
    const bool is_begin = mark == '{' || mark == '[';
    if (is_end && json[at - 1] != '{' && json[at - 1] != '[') {
      --depth;
      begin_line();
    }
    lines += mark;
    ++at;
    if (mark == ':') lines += ' ';
    if (mark == ',') begin_line();
    if (is_begin && at < json.size() && json[at] != '}' && json[at] != ']') {
      ++depth;
      begin_line();
    }
  }
  return lines;
}

std::string json_fault(const std::exception& thrown) {
  if (const auto* parsed = dynamic_cast<const Json::parse_error*>(&thrown))
    return "no JSON from byte " + std::to_string(parsed->byte) + " on";
  const std::string_view told = thrown.what();
  constexpr std::string_view kKey = "key '", kNotFound = "' not found";
  const std::size_t key = told.find(kKey), end = told.rfind(kNotFound);
  if (key != std::string_view::npos && end != std::string_view::npos) {
    const std::size_t begin = key + kKey.size();
    return "the entry '" + std::string(told.substr(begin, end - begin)) + "' is missing";
  }
  if (dynamic_cast<const Json::out_of_range*>(&thrown) != nullptr)
    return "something that belongs there is missing";
  return "a value of another type than belongs there";
}

}  // namespace tessera
