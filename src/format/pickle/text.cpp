#include "format/pickle/text.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "base/text.h"
#include "tessera/error.h"
#include "value/integer.h"

namespace tessera::pickle {
namespace {

// `count` hexadecimal digits, at most 8, at the start of `text`.
std::uint32_t hex(std::string_view text, std::size_t count) {
  const std::string_view digits = text.substr(0, count);
  std::uint32_t number = 0;
  const char* const end =
      std::from_chars(digits.data(), digits.data() + digits.size(), number, 16).ptr;
  if (static_cast<std::size_t>(end - digits.data()) != count) {
    throw Error(ErrorCode::corrupt, "a string escape lacks hexadecimal digits");
  }
  return number;
}

// `count` hexadecimal digits of a character.
std::uint32_t code_point(std::string_view text, std::size_t count) {
  const std::uint32_t code = hex(text, count);
  if (code > 0x10ffff) throw Error(ErrorCode::corrupt, "a string has a code point above U+10FFFF");
  return code;
}

// What a literal of protocol 0 has between its quotes; blanks behind it do not count.
std::string_view between_quotes(std::string_view literal) {
  literal = literal.substr(0, literal.find_last_not_of("\r ") + 1);
  const bool quoted = literal.size() >= 2 && literal.front() == literal.back() &&
                      is_one_of(literal.front(), '\'', '"');
  if (!quoted) throw Error(ErrorCode::corrupt, "a string is not in quotes");
  return literal.substr(1, literal.size() - 2);
}

// Takes up to three octal digits off the text, of which a byte is left.
char take_octal(std::string_view& text) {
  unsigned number = 0;
  for (int i = 0; i < 3 && !text.empty() && text[0] >= '0' && text[0] <= '7'; ++i) {
    number = number * 8 + static_cast<unsigned>(text[0] - '0');
    text.remove_prefix(1);
  }
  return static_cast<char>(number & 0xffU);
}

// Takes an escape, whose backslash comes first, off the text and gives what it stands for: of one
// that Python does not know the backslash itself.
char take_escape(std::string_view& text) {
  constexpr std::string_view kLetters = "\\'\"abfnrtv";
  constexpr std::string_view kMeanings = "\\'\"\a\b\f\n\r\t\v";
  if (text.size() == 1) throw Error(ErrorCode::corrupt, "a string ends within an escape");
  const char letter = text[1];
  if (letter >= '0' && letter <= '7') {
    text.remove_prefix(1);
    return take_octal(text);
  }
  if (letter == 'x') {
    const auto code = static_cast<char>(hex(text.substr(2), 2));
    text.remove_prefix(4);
    return code;
  }
  const std::size_t known = kLetters.find(letter);
  const bool is_known = known != std::string_view::npos;
  text.remove_prefix(is_known ? 2 : 1);
  return is_known ? kMeanings[known] : '\\';
}

}  // namespace

void require_utf8(std::string_view text) {
  // Nearly all text is ASCII.
  const auto is_ascii = [](char c) { return static_cast<unsigned char>(c) < 0x80; };
  if (std::all_of(text.begin(), text.end(), is_ascii)) return;
  while (!text.empty()) {
    const std::size_t length = first_rune(text).length;
    if (length == 0) throw Error(ErrorCode::corrupt, "a string is not UTF-8");
    text.remove_prefix(length);
  }
}

std::vector<std::byte> latin1_to_bytes(std::string_view utf8) {
  std::vector<std::byte> bytes;
  bytes.reserve(utf8.size());
  for (std::size_t i = 0; i < utf8.size(); ++i) {
    const auto lead = static_cast<unsigned char>(utf8[i]);
    if (lead < 0x80) {
      bytes.push_back(static_cast<std::byte>(lead));
    } else if ((lead == 0xc2 || lead == 0xc3) && i + 1 < utf8.size()) {
      const auto next = static_cast<unsigned char>(utf8[++i]);
      bytes.push_back(static_cast<std::byte>(((lead & 3U) << 6U) | (next & 0x3fU)));
    } else {
      throw Error(ErrorCode::corrupt, "bytes are written as a string that is not Latin-1");
    }
  }
  return bytes;
}

std::string bytes_to_latin1(ByteView bytes) {
  std::string text;
  text.reserve(bytes.size());
  for (const std::byte byte : bytes) append_utf8(text, std::to_integer<std::uint32_t>(byte));
  return text;
}

std::string unquote(std::string_view literal) {
  literal = between_quotes(literal);
  std::string text;
  while (!literal.empty()) {
    if (literal.front() == '\\') {
      text += take_escape(literal);
    } else {
      text += literal.front();
      literal.remove_prefix(1);
    }
  }
  require_utf8(text);
  return text;
}

std::string decode_raw_unicode(std::string_view escaped) {
  std::string text;
  while (!escaped.empty()) {
    if (is_one_of(escaped.substr(0, 2), "\\u", "\\U")) {
      const std::size_t digits = escaped[1] == 'u' ? 4 : 8;
      append_utf8(text, code_point(escaped.substr(2), digits));
      escaped.remove_prefix(2 + digits);
    } else {
      // A backslash takes what follows it along: of two, the second one begins no escape.
      const std::size_t count = escaped.front() == '\\' && escaped.size() > 1 ? 2 : 1;
      for (const char c : escaped.substr(0, count))
        append_utf8(text, static_cast<unsigned char>(c));
      escaped.remove_prefix(count);
    }
  }
  return text;
}

double parse_real(std::string_view text) {
  double real = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), real);
  if (error != std::errc() || end != text.data() + text.size()) {
    throw Error(ErrorCode::corrupt, "a float is not written as Python writes it");
  }
  return real;
}

std::uint64_t parse_index(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\n\v\f\r";
  text = text.substr(0, text.find('\0'));
  text.remove_prefix(std::min(text.find_first_not_of(kBlanks), text.size()));
  text = text.substr(0, text.find_last_not_of(kBlanks) + 1);
  std::string digits;
  char last = '_';
  for (const char c : text) {
    if (c == '_' && last == '_')
      throw Error(ErrorCode::corrupt, "a number is not written as Python writes it");
    if (c != '_') digits += c;
    last = is_one_of(c, '+', '-') ? '_' : c;
  }
  if (last == '_') throw Error(ErrorCode::corrupt, "a number ends without a digit");
  const Integer index = integer_from_decimal(digits);
  if (!index.big.empty() || index.small < 0)
    throw Error(ErrorCode::corrupt, "a memo index is not a number that counts");
  return static_cast<std::uint64_t>(index.small);
}

Value parse_integer(std::string_view text) {
  if (text == "00") return Value(false);
  if (text == "01") return Value(true);
  if (text.ends_with('L')) text.remove_suffix(1);
  return Value::integer(integer_from_decimal(text));
}

}  // namespace tessera::pickle
