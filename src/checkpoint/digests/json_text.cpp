#include "checkpoint/digests/json_text.h"

#include <cstddef>

#include <nlohmann/json.hpp>

namespace tessera {
namespace {

// Where the string that begins at `at` ends.
std::size_t end_of_string(std::string_view json, std::size_t at) {
  for (++at; at < json.size() && json[at] != '"'; ++at)
    if (json[at] == '\\') ++at;
  return at + 1;
}

}  // namespace

// A value that is no container needs no memory to be destroyed.
std::string json_quoted(const std::string& text, bool ascii) {
  return nlohmann::json(text).dump(-1, ' ', ascii, nlohmann::json::error_handler_t::replace);
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

}  // namespace tessera
