#include "base/name_number.h"

#include <algorithm>
#include <charconv>

namespace tessera {
namespace {

constexpr std::size_t kMostDigits = 7;

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::optional<int> number_of(std::string_view digits) {
  if (digits.empty() || digits.size() > kMostDigits || !std::ranges::all_of(digits, is_digit))
    return std::nullopt;
  int number = 0;
  (void)std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number < kNumberBound ? std::optional(number) : std::nullopt;
}

}  // namespace

std::optional<int> plain_number(std::string_view text) {
  if (text.size() > 1 && text.front() == '0') return std::nullopt;
  return number_of(text);
}

std::optional<int> padded_number(std::string_view text) {
  return text.size() < kMostDigits ? number_of(text) : std::nullopt;
}

std::optional<int> number_between(std::string_view prefix, std::string_view name,
                                  std::string_view suffix) {
  if (name.size() <= prefix.size() + suffix.size() || !name.starts_with(prefix) ||
      !name.ends_with(suffix)) {
    return std::nullopt;
  }
  name.remove_prefix(prefix.size());
  name.remove_suffix(suffix.size());
  return plain_number(name);
}

}  // namespace tessera
