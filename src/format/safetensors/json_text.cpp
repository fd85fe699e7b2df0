#include "format/safetensors/json_text.h"

#include "tessera/error.h"

namespace tessera::safetensors {
namespace {

constexpr std::string_view kHex = "0123456789abcdef";

// Length of the UTF-8 sequence at the start of `text`; 0 when it is not one.
std::size_t sequence(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const std::size_t size = first < 0x80   ? 1
                           : first < 0xC2 ? 0
                           : first < 0xE0 ? 2
                           : first < 0xF0 ? 3
                           : first < 0xF5 ? 4
                                          : 0;
  if (size == 0 || size > text.size()) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and code points beyond U+10FFFF show in the second byte.
  if (first == 0xE0 && byte(1) < 0xA0) return 0;
  if (first == 0xED && byte(1) > 0x9F) return 0;
  if (first == 0xF0 && byte(1) < 0x90) return 0;
  if (first == 0xF4 && byte(1) > 0x8F) return 0;
  return size;
}

void append_unit(std::string& out, std::uint32_t unit) {
  out += "\\u";
  for (int shift = 12; shift >= 0; shift -= 4) out += kHex[(unit >> shift) & 15];
}

// One character beyond ASCII as UTF-16 escapes.
void append_escaped(std::string& out, std::string_view sequence) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(sequence[i]); };
  std::uint32_t point = byte(0) & (0xFFU >> (sequence.size() + 1));
  for (std::size_t i = 1; i < sequence.size(); ++i) point = point << 6 | (byte(i) & 0x3F);
  if (point < 0x10000) return append_unit(out, point);
  point -= 0x10000;
  append_unit(out, 0xD800 | point >> 10);
  append_unit(out, 0xDC00 | (point & 0x3FF));
}

}  // namespace

void append_json(std::string& out, std::string_view text, JsonText how) {
  out += '"';
  for (std::size_t i = 0; i < text.size();) {
    const std::size_t size = sequence(text.substr(i));
    if (size == 0) {
      throw Error(ErrorCode::invalid_argument, "a safetensors name that is not UTF-8")
          .at_key(std::string(text));
    }
    const char c = text[i];
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (size == 1 && static_cast<unsigned char>(c) < 0x20) {
          append_unit(out, static_cast<unsigned char>(c));
        } else if (size > 1 && how == JsonText::ascii) {
          append_escaped(out, text.substr(i, size));
        } else {
          out += text.substr(i, size);
        }
    }
    i += size;
  }
  out += '"';
}

}  // namespace tessera::safetensors
