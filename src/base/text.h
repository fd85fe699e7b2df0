// Texts for people: what an error lists, what somebody may have meant, numbers in names, UTF-8.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// Names that somebody may have meant who typed one that is not there.

// The name nearest to `typed`: at most two letters inserted, left out, changed or swapped with
// their neighbour, and fewer than half of it. Empty: none is that near, or more than 256 letters
// were typed.
[[nodiscard]] std::string nearest(std::string_view typed, const std::vector<std::string>& names);

}  // namespace tessera
#pragma GCC visibility pop

namespace tessera {

// ASCII letters, whatever the locale.

[[nodiscard]] constexpr bool is_digit(char c) {
  return c >= '0' && c <= '9';
}
[[nodiscard]] std::string lowered(std::string_view text);

// How an error tells of many ranks or files.

// "rank 3 on HOST"
[[nodiscard]] inline std::string rank_on_host(int rank, const std::string& host) {
  return "rank " + std::to_string(rank) + (host.empty() ? "" : " on " + host);
}

// A list of which the first are named.
class Named {
 public:
  static constexpr std::size_t kMost = 16;
  void add(const std::string& text) {
    if (++count_ <= kMost) text_ += (count_ > 1 ? ", " : "") + text;
  }
  // Adds texts that nobody names.
  void add_unnamed(std::size_t count) { count_ += count; }
  [[nodiscard]] std::size_t count() const { return count_; }
  [[nodiscard]] std::string text() const {
    return count_ <= kMost ? text_ : text_ + " and " + std::to_string(count_ - kMost) + " more";
  }

 private:
  std::string text_;
  std::size_t count_ = 0;
};

// Takes the prefix from the beginning of `text`, if it is there.
[[nodiscard]] inline bool take_prefix(std::string_view& text, std::string_view prefix) {
  if (!text.starts_with(prefix)) return false;
  text.remove_prefix(prefix.size());
  return true;
}

// Numbers in names, such as those of files that have a rank in theirs. Anybody may have made the
// names.

// Numbers in names are less, so that neither one more nor the product of two overflows.
inline constexpr int kNumberBound = 1 << 20;

// A number as programs write it: digits without zeros in front. None: the text is something else.
[[nodiscard]] std::optional<int> plain_number(std::string_view text);

// A number with zeros in front, as sets of files count; of one digit to six.
[[nodiscard]] std::optional<int> padded_number(std::string_view text);

// The number between `prefix` and `suffix` in `name`, when it is a plain one.
[[nodiscard]] std::optional<int> number_between(std::string_view prefix, std::string_view name,
                                                std::string_view suffix);

// UTF-8, a character at a time.

struct Rune {
  std::size_t length = 0;  // in bytes
  std::uint32_t code = 0;
};

// UTF-8 has none of them; Python writes and reads them under "surrogatepass".
[[nodiscard]] constexpr bool is_surrogate(std::uint32_t code) noexcept {
  return code >= 0xd800 && code < 0xe000;
}

// The character at the start of `text`, which is not empty: the shortest form of a code point up to
// U+10FFFF, surrogates among them. Length 0: there is none.
[[nodiscard]] inline Rune first_rune(std::string_view text) noexcept {
  const auto lead = static_cast<unsigned char>(text[0]);
  if (lead < 0x80) return {1, lead};
  const auto length = static_cast<std::size_t>(std::countl_one(lead));
  if (length < 2 || length > 4 || text.size() < length) return {};
  std::uint32_t code = lead & (0x7fU >> length);
  for (const char c : text.substr(1, length - 1)) {
    const auto byte = static_cast<unsigned char>(c);
    if ((byte & 0xc0U) != 0x80U) return {};
    code = (code << 6U) | (byte & 0x3fU);
  }
  constexpr std::array<std::uint32_t, 5> kSmallest = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kSmallest[length] || code > 0x10ffff) return {};
  return {length, code};
}

// The other way: a code point up to U+10FFFF, which may be a surrogate.
inline void append_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&out](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) {
    put(code);
  } else if (code < 0x800) {
    put(0xc0U | (code >> 6U));
    put(0x80U | (code & 0x3fU));
  } else if (code < 0x10000) {
    put(0xe0U | (code >> 12U));
    put(0x80U | ((code >> 6U) & 0x3fU));
    put(0x80U | (code & 0x3fU));
  } else {
    put(0xf0U | (code >> 18U));
    put(0x80U | ((code >> 12U) & 0x3fU));
    put(0x80U | ((code >> 6U) & 0x3fU));
    put(0x80U | (code & 0x3fU));
  }
}

// A value among a few.

template <typename T, typename... Options>
[[nodiscard]] constexpr bool is_one_of(const T& value, const Options&... options) {
  return ((value == options) || ...);
}

}  // namespace tessera
