// Regular expressions that a user gives: matched in time in proportion to the text, whatever they
// are, because a name in somebody's file may be made to take years otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace re2 {
class RE2;
}

namespace tessera {

// In RE2's syntax, over UTF-8. It lacks what needs backtracking in ECMAScript's and Python's:
// looking ahead or behind, and back-references. Any number of threads may use one.
class Expression {
 public:
  // The characters of pattern and texts. A text that is no UTF-8 matches nothing there.
  enum class Letters : std::uint8_t { utf8, bytes };
  // Throws `invalid_argument` for what is no such expression, with what RE2 says of it.
  explicit Expression(const std::string& text, Letters letters = Letters::utf8);
  ~Expression();
  Expression(Expression&&) noexcept;
  Expression& operator=(Expression&&) noexcept;

  // Whether the whole text matches.
  [[nodiscard]] bool matches(std::string_view text) const;

  // The replacement of a match: text, and groups of the match.
  struct Part {
    std::string text;
    int group = -1;  // behind the text; 0: the whole match, -1: none
  };
  using Replacement = std::vector<Part>;
  // `\1` and `$1` are both the first group, up to 99; `\0`, `$0` and `$&` the whole match; `\\` and
  // `$$` are the character itself. Throws `invalid_argument` for a group that the expression lacks,
  // and for anything else behind `\` or `$`.
  [[nodiscard]] Replacement replacement_of(std::string_view text) const;
  // Replaces every match, from left to right; a group that took no part in one is empty. Empty
  // matches count, as in ECMAScript and Python. Finding all may take the square of the text's
  // length.
  [[nodiscard]] std::string replaced(std::string_view text, const Replacement& by) const;

 private:
  std::unique_ptr<re2::RE2> compiled_;
};

// A glob of the shell, over a whole text: `*` is any characters, `?` is one, `[a-c]` one of these,
// `[!a-c]` or `[^a-c]` one of the others, and `\` takes away the meaning of what follows it.
// Characters are those of UTF-8; in a text that is none, or for a glob that is none, they are
// bytes.
class Glob {
 public:
  explicit Glob(std::string_view glob);
  [[nodiscard]] bool fits(std::string_view text) const;

 private:
  std::optional<Expression> letters_;  // empty for a glob that is no UTF-8
  Expression bytes_;
};

}  // namespace tessera
