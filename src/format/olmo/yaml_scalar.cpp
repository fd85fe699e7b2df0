#include "format/olmo/yaml_scalar.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/checked.h"
#include "tessera/error.h"
#include "value/integer.h"

namespace tessera::olmo {
namespace {

constexpr std::size_t kLongestNumber = 8192;  // characters; a longer scalar is text

constexpr std::array<std::pair<std::string_view, bool>, 18> kBooleans = {{{"yes", true},
                                                                          {"Yes", true},
                                                                          {"YES", true},
                                                                          {"no", false},
                                                                          {"No", false},
                                                                          {"NO", false},
                                                                          {"true", true},
                                                                          {"True", true},
                                                                          {"TRUE", true},
                                                                          {"false", false},
                                                                          {"False", false},
                                                                          {"FALSE", false},
                                                                          {"on", true},
                                                                          {"On", true},
                                                                          {"ON", true},
                                                                          {"off", false},
                                                                          {"Off", false},
                                                                          {"OFF", false}}};

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Takes characters off the front of `rest` while `fits`, and says how many.
template <typename Fits>
std::size_t take(std::string_view& rest, Fits fits) {
  const auto end = std::find_if_not(rest.begin(), rest.end(), fits);
  const auto count = static_cast<std::size_t>(end - rest.begin());
  rest.remove_prefix(count);
  return count;
}

bool take_any(std::string_view& rest, std::string_view characters) {
  if (rest.empty() || characters.find(rest.front()) == std::string_view::npos) return false;
  rest.remove_prefix(1);
  return true;
}

bool digit_or_line(char c) {
  return is_digit(c) || c == '_';
}

// [0-9]+(?:_[0-9]+)*
bool take_grouped(std::string_view& rest) {
  if (take(rest, is_digit) == 0) return false;
  while (rest.size() >= 2 && rest[0] == '_' && is_digit(rest[1])) {
    rest.remove_prefix(1);
    take(rest, is_digit);
  }
  return true;
}

// (?::[0-5]?[0-9])+ ; false when there is none.
bool take_sixties(std::string_view& rest) {
  bool any = false;
  while (rest.size() >= 2 && rest[0] == ':' && is_digit(rest[1])) {
    const bool two = rest.size() >= 3 && rest[1] <= '5' && is_digit(rest[2]);
    rest.remove_prefix(two ? 3 : 2);
    any = true;
  }
  return any;
}

std::string without_lines(std::string_view text) {
  std::string plain(text);
  std::erase(plain, '_');
  return plain;
}

Value in_base(std::string_view digits, int base, bool negative) {
  const std::string plain = without_lines(digits);
  std::int64_t value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value, base);
  if (result.ec != std::errc() || result.ptr != plain.data() + plain.size()) {
    throw Error(ErrorCode::limit, "a YAML integer of more than 64 bits");
  }
  return {negative ? -value : value};
}

// 1:30:15 -> 5415
Value sixties(std::string_view text, bool negative) {
  std::int64_t value = 0;
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(':', begin), text.size());
    const Value part = in_base(text.substr(begin, end - begin), 10, false);
    value = checked_add(checked_mul<std::int64_t>(value, 60), part.as_int());
    begin = end + 1;
  }
  return {negative ? -value : value};
}

std::optional<Value> integer_of(std::string_view text) {
  std::string_view rest = text;
  const bool negative = rest.front() == '-';
  take_any(rest, "+-");
  const std::string_view number = rest;
  if (number.size() > 2 && number[0] == '0' && (number[1] == 'b' || number[1] == 'x')) {
    const bool hex = number[1] == 'x';
    rest.remove_prefix(2);
    take(rest, [hex](char c) {
      const bool letter = (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
      return c == '_' || (hex ? is_digit(c) || letter : c == '0' || c == '1');
    });
    if (!rest.empty()) return std::nullopt;
    return in_base(number.substr(2), hex ? 16 : 2, negative);
  }
  if (number == "0") return Value(std::int64_t{0});
  if (number.size() > 1 && number[0] == '0') {
    rest.remove_prefix(1);
    take(rest, [](char c) { return c == '_' || (c >= '0' && c <= '7'); });
    if (!rest.empty()) return std::nullopt;
    return in_base(number.substr(1), 8, negative);
  }
  if (number.empty() || !is_digit(number[0])) return std::nullopt;
  take(rest, digit_or_line);
  if (rest.empty()) {
    return Value::integer(integer_from_decimal((negative ? "-" : "") + without_lines(number)));
  }
  if (!take_sixties(rest) || !rest.empty()) return std::nullopt;
  return sixties(number, negative);
}

// [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)? and the forms without a point or an integer
// part; the latter has no sign, and one in its exponent.
bool is_real(std::string_view rest) {
  if (!rest.empty() && rest[0] == '.') {
    rest.remove_prefix(1);
    if (!take_grouped(rest)) return false;
    take(rest, [](char c) { return c == '_'; });
    if (rest.empty()) return true;
    return take_any(rest, "eE") && take_any(rest, "+-") && take(rest, is_digit) > 0 && rest.empty();
  }
  take_any(rest, "+-");
  if (!take_grouped(rest)) return false;
  // PyYAML's own rule takes lines anywhere, but then wants a point and a signed exponent.
  const bool loose = take(rest, digit_or_line) > 0;
  const bool point = take_any(rest, ".");
  if (point) take(rest, digit_or_line);
  if (rest.empty() || (loose && !point)) return point;
  if (!take_any(rest, "eE")) return false;
  const bool sign = take_any(rest, "+-");
  return (sign || !loose) && take(rest, is_digit) > 0 && rest.empty();
}

// 1:30.5 -> 90.5
bool is_real_of_sixties(std::string_view rest) {
  take_any(rest, "+-");
  if (!take_grouped(rest)) return false;
  take(rest, digit_or_line);
  if (!take_sixties(rest) || !take_any(rest, ".")) return false;
  take(rest, digit_or_line);
  return rest.empty();
}

double to_double(std::string_view text) {
  const std::string plain = without_lines(text.starts_with('+') ? text.substr(1) : text);
  double value = 0;
  const auto result = std::from_chars(plain.data(), plain.data() + plain.size(), value);
  if (result.ec == std::errc::result_out_of_range) {
    // What from_chars leaves alone: too large, or too small to tell from 0.
    const std::size_t exponent = plain.find_first_of("eE");
    const bool small = exponent != std::string::npos && plain[exponent + 1] == '-';
    value = small ? 0 : std::numeric_limits<double>::infinity();
    return plain.front() == '-' ? -value : value;
  }
  return value;
}

std::optional<Value> real_of(std::string_view text) {
  std::string_view rest = text;
  const bool negative = text.front() == '-';
  take_any(rest, "+-");
  if (rest == ".inf" || rest == ".Inf" || rest == ".INF") {
    const double infinity = std::numeric_limits<double>::infinity();
    return Value(negative ? -infinity : infinity);
  }
  if (text == ".nan" || text == ".NaN" || text == ".NAN") {
    return Value(std::numeric_limits<double>::quiet_NaN());
  }
  if (is_real(text)) return Value(to_double(text));
  if (!is_real_of_sixties(text)) return std::nullopt;
  const std::size_t last = rest.rfind(':');
  const double value = static_cast<double>(sixties(rest.substr(0, last), false).as_int()) * 60 +
                       to_double(rest.substr(last + 1));
  return Value(negative ? -value : value);
}

}  // namespace

Value plain_scalar(std::string_view text) {
  if (text.empty() || text == "~" || text == "null" || text == "Null" || text == "NULL") return {};
  for (const auto& [word, value] : kBooleans) {
    if (text == word) return {value};
  }
  const bool numeric = is_digit(text[0]) || text[0] == '+' || text[0] == '-' || text[0] == '.';
  if (numeric && text.size() <= kLongestNumber) {
    // In this order: every integer that has a point or an exponent is a real.
    if (auto real = real_of(text)) return *real;
    if (auto integer = integer_of(text)) return *integer;
  }
  return {std::string(text)};
}

}  // namespace tessera::olmo
