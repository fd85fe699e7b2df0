// JSON of safetensors files: strings as the two libraries write them, and a reader by rapidjson.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include <rapidjson/encodedstream.h>
#include <rapidjson/error/en.h>
#include <rapidjson/memorystream.h>
#include <rapidjson/reader.h>

#include "tessera/io.h"

namespace tessera::safetensors {

// Strings as JSON, as the two libraries write them whose files we repeat to the byte.

enum class JsonText : std::uint8_t {
  utf8,   // serde_json: characters beyond ASCII as they are
  ascii,  // Python: as \u escapes
};

// Appends `text` with its quotes. Throws `invalid_argument` when it is not UTF-8.
void append_json(std::string& out, std::string_view text, JsonText how);

// Reads JSON by rapidjson. Numbers are texts: they arrive at a handler in RawNumber only.

struct NumbersAsText {
  static bool Int(int) { return false; }
  static bool Uint(unsigned) { return false; }
  static bool Int64(std::int64_t) { return false; }
  static bool Uint64(std::uint64_t) { return false; }
  static bool Double(double) { return false; }
};

// The count that a number in the JSON says; none when it is negative, a fraction or too large.
[[nodiscard]] inline std::optional<std::uint64_t> count_of(std::string_view text) {
  std::uint64_t value = 0;
  const char* const last = text.data() + text.size();
  const auto [end, problem] = std::from_chars(text.data(), last, value);
  if (problem != std::errc() || end != last) return std::nullopt;
  return value;
}

// The end of the JSON, or the place where it is at fault.
struct JsonEnd {
  std::size_t at = 0;
  std::string problem;  // the handler's `error`, or else the parser's; empty: none
};

template <class Handler>
JsonEnd parse_json(ByteView text, Handler& handler) {
  rapidjson::MemoryStream stream(reinterpret_cast<const char*>(text.data()), text.size());
  rapidjson::EncodedInputStream<rapidjson::UTF8<>, rapidjson::MemoryStream> input(stream);
  rapidjson::Reader reader;
  reader.Parse<rapidjson::kParseValidateEncodingFlag | rapidjson::kParseNumbersAsStringsFlag>(
      input, handler);
  if (!reader.HasParseError()) return {input.Tell(), {}};
  const std::size_t at = std::min<std::size_t>(reader.GetErrorOffset(), text.size());
  if (!handler.error.empty()) return {at, handler.error};
  return {at, rapidjson::GetParseError_En(reader.GetParseErrorCode())};
}

}  // namespace tessera::safetensors
