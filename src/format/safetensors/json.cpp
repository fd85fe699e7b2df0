#include "format/safetensors/json.h"

#include "base/text.h"
#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

constexpr std::string_view kHex = "0123456789abcdef";
constexpr std::uint32_t kDelete = 0x7f;  // which Python's json does not take for ASCII

void append_unit(std::string& out, std::uint32_t unit) {
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kHex[(unit >> shift) & 15];
}

// A character as UTF-16 escapes.
void append_escaped(std::string& out, std::uint32_t code) {
  if (code < 0x10000) return append_unit(out, code);
  code -= 0x10000;
  append_unit(out, 0xD800 | code >> 10);
  append_unit(out, 0xDC00 | (code & 0x3FF));
}

void append_character(std::string& out, const Rune& rune, std::string_view bytes, JsonText how) {
  constexpr std::string_view kNamed = "\"\\\b\f\n\r\t";
  constexpr std::string_view kNames = "\"\\bfnrt";
  const std::size_t named = bytes.size() == 1 ? kNamed.find(bytes[0]) : std::string_view::npos;
  if (named != std::string_view::npos) {
    out += '\\';
    out += kNames[named];
  } else if (rune.code < 0x20) {
    append_unit(out, rune.code);
  } else if (rune.code >= kDelete && how == JsonText::ascii) {
    append_escaped(out, rune.code);
  } else {
    out += bytes;
  }
}

}  // namespace

void append_json(std::string& out, std::string_view text, JsonText how) {
  out += '"';
  for (std::size_t i = 0; i < text.size();) {
    const Rune rune = first_rune(text.substr(i));
    if (rune.length == 0 || is_surrogate(rune.code)) {
      throw Error(ErrorCode::invalid_argument, "a safetensors name that is not UTF-8")
          .at_key(std::string(text));
    }
    append_character(out, rune, text.substr(i, rune.length), how);
    i += rune.length;
  }
  out += '"';
}

}  // namespace tessera::safetensors
