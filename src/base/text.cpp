#include "base/text.h"

#include <algorithm>
#include <charconv>

namespace tessera {
namespace {

constexpr std::size_t kFarthest = 2;        // edits
constexpr std::size_t kLongestTyped = 256;  // letters; the work for a name is their square

// Whether letters i and j end the same pair, swapped.
bool ends_swapped(std::string_view a, std::size_t i, std::string_view b, std::size_t j) {
  return i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
}

// Damerau's distance, where a swapped pair is one edit.
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::vector<std::size_t>> edits(a.size() + 1, std::vector<std::size_t>(b.size() + 1));
  for (std::size_t i = 0; i <= a.size(); ++i) edits[i][0] = i;
  for (std::size_t j = 0; j <= b.size(); ++j) edits[0][j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t changed = edits[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      edits[i][j] = std::min({edits[i - 1][j] + 1, edits[i][j - 1] + 1, changed});
      if (ends_swapped(a, i, b, j)) edits[i][j] = std::min(edits[i][j], edits[i - 2][j - 2] + 1);
    }
  }
  return edits[a.size()][b.size()];
}

}  // namespace

std::string nearest(std::string_view typed, const std::vector<std::string>& names) {
  std::string best;
  if (typed.size() > kLongestTyped) return best;
  std::size_t least = kFarthest + 1;
  for (const std::string& name : names) {
    if (name.size() > typed.size() + kFarthest || typed.size() > name.size() + kFarthest) continue;
    const std::size_t edits = distance(typed, name);
    if (edits < least && 2 * edits < std::max(typed.size(), name.size())) {
      least = edits;
      best = name;
    }
  }
  return best;
}

namespace {

constexpr std::size_t kMostDigits = 7;

std::optional<int> number_of(std::string_view digits) {
  if (digits.empty() || digits.size() > kMostDigits || !std::ranges::all_of(digits, is_digit))
    return std::nullopt;
  int number = 0;
  (void)std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return number < kNumberBound ? std::optional(number) : std::nullopt;
}

}  // namespace

std::string lowered(std::string_view text) {
  std::string result(text);
  for (char& c : result) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return result;
}

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
