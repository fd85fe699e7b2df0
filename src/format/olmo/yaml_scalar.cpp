#include "format/olmo/yaml_scalar.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "base/checked.h"
#include "base/one_of.h"
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

// What follows the 0 of a number that is not decimal; without a letter it is octal.
struct Base {
  char letter;
  std::string_view digits;
  int number;
};
constexpr std::array<Base, 2> kBases = {{{'b', "01_", 2}, {'x', "0123456789abcdefABCDEF_", 16}}};

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

// Whether a digit follows the first character, which is `separator`.
bool goes_on(std::string_view rest, char separator) {
  return rest.size() >= 2 && rest[0] == separator && is_digit(rest[1]);
}

// [0-9]+(?:_[0-9]+)*
bool take_grouped(std::string_view& rest) {
  if (take(rest, is_digit) == 0) return false;
  while (goes_on(rest, '_')) {
    rest.remove_prefix(1);
    take(rest, is_digit);
  }
  return true;
}

// (?::[0-5]?[0-9])+ ; false when there is none.
bool take_sixties(std::string_view& rest) {
  bool any = false;
  while (goes_on(rest, ':')) {
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
  if (plain.empty()) throw Error(ErrorCode::corrupt, "a YAML integer without digits");
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

std::optional<Value> in_base_if(std::string_view digits, std::string_view allowed, int base,
                                bool negative) {
  if (digits.find_first_not_of(allowed) != std::string_view::npos) return std::nullopt;
  return in_base(digits, base, negative);
}

std::optional<Value> decimal_of(std::string_view number, bool negative) {
  std::string_view rest = number;
  if (number.empty() || !is_digit(number[0])) return std::nullopt;
  take(rest, digit_or_line);
  if (rest.empty()) {
    return Value::integer(integer_from_decimal((negative ? "-" : "") + without_lines(number)));
  }
  if (!take_sixties(rest) || !rest.empty()) return std::nullopt;
  return sixties(number, negative);
}

std::optional<Value> integer_of(std::string_view text) {
  const bool negative = text.front() == '-';
  std::string_view number = text;
  take_any(number, "+-");
  if (number == "0") return Value(std::int64_t{0});
  if (number.size() < 2 || number[0] != '0') return decimal_of(number, negative);
  const std::string_view digits = number.substr(2);
  const auto* base = std::ranges::find(kBases, number[1], &Base::letter);
  if (base != kBases.end() && !digits.empty())
    return in_base_if(digits, base->digits, base->number, negative);
  return in_base_if(number.substr(1), "01234567_", 8, negative);
}

// [eE][-+]?[0-9]+, which must have its sign `with_sign`.
bool is_exponent(std::string_view rest, bool with_sign) {
  if (!take_any(rest, "eE")) return false;
  const bool sign = take_any(rest, "+-");
  return (sign || !with_sign) && take(rest, is_digit) > 0 && rest.empty();
}

// \.[0-9]+(?:_[0-9]+)*_*(?:[eE][-+][0-9]+)?
bool is_fraction(std::string_view rest) {
  if (!take_any(rest, ".") || !take_grouped(rest)) return false;
  take(rest, [](char c) { return c == '_'; });
  return rest.empty() || is_exponent(rest, true);
}

// [-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)? and the form without a point.
bool is_real_with_integer(std::string_view rest) {
  take_any(rest, "+-");
  if (!take_grouped(rest)) return false;
  // PyYAML's own rule takes lines anywhere, but then wants a point and a signed exponent.
  const bool loose = take(rest, digit_or_line) > 0;
  const bool point = take_any(rest, ".");
  if (point) take(rest, digit_or_line);
  if (rest.empty() || (loose && !point)) return point;
  return is_exponent(rest, loose);
}

// Only what has an integer part has a sign before it.
bool is_real(std::string_view text) {
  return text.starts_with('.') ? is_fraction(text) : is_real_with_integer(text);
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
  if (is_one_of(rest, ".inf", ".Inf", ".INF")) {
    const double infinity = std::numeric_limits<double>::infinity();
    return Value(negative ? -infinity : infinity);
  }
  if (is_one_of(text, ".nan", ".NaN", ".NAN")) {
    return Value(std::numeric_limits<double>::quiet_NaN());
  }
  if (is_real(text)) return Value(to_double(text));
  if (!is_real_of_sixties(text)) return std::nullopt;
  const std::size_t last = rest.rfind(':');
  const double value = static_cast<double>(sixties(rest.substr(0, last), false).as_int()) * 60 +
                       to_double(rest.substr(last + 1));
  return Value(negative ? -value : value);
}

bool begins_as_number(std::string_view text) {
  return is_digit(text[0]) || is_one_of(text[0], '+', '-', '.');
}

std::optional<Value> number_of(std::string_view text) {
  if (!begins_as_number(text) || text.size() > kLongestNumber) return std::nullopt;
  // In this order: every integer that has a point or an exponent is a real.
  if (auto real = real_of(text)) return real;
  return integer_of(text);
}

}  // namespace

Value plain_scalar(std::string_view text) {
  if (is_one_of(text, "", "~", "null", "Null", "NULL")) return {};
  const auto* word = std::ranges::find(kBooleans, text, [](const auto& row) { return row.first; });
  if (word != kBooleans.end()) return {word->second};
  return number_of(text).value_or(std::string(text));
}

}  // namespace tessera::olmo
