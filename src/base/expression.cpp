#include "base/expression.h"

#include <re2/re2.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "base/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

RE2::Options options(Expression::Letters letters) {
  RE2::Options made;
  made.set_log_errors(false);  // a library never prints
  if (letters == Expression::Letters::bytes) made.set_encoding(RE2::Options::EncodingLatin1);
  return made;
}

// The number at the beginning of `text`, which is taken off it: two digits where there are that
// many groups, else one.
int take_group(std::string_view& text, int groups) {
  int number = text[0] - '0';
  const bool two = text.size() > 1 && is_digit(text[1]) && number * 10 + text[1] - '0' <= groups;
  if (two) number = number * 10 + text[1] - '0';
  text.remove_prefix(two ? 2 : 1);
  return number;
}

// The begin of the letter behind `at`: nothing is put into the middle of one.
std::size_t next_letter(std::string_view text, std::size_t at) {
  do {
    ++at;
  } while (at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80);
  return at;
}

}  // namespace

Expression::Expression(const std::string& text, Letters letters)
    : compiled_(std::make_unique<RE2>(text, options(letters))) {
  if (compiled_->ok()) return;
  std::string what = "'" + text + "' is no regular expression: " + compiled_->error();
  if (is_one_of(compiled_->error_code(), RE2::ErrorBadPerlOp, RE2::ErrorBadEscape)) {
    what +=
        "; the engine is RE2, whose time is linear: it has no looking ahead or behind and no "
        "back-references";
  }
  refuse(what);
}

Expression::~Expression() = default;
Expression::Expression(Expression&&) noexcept = default;
Expression& Expression::operator=(Expression&&) noexcept = default;

bool Expression::matches(std::string_view text) const {
  return RE2::FullMatch({text.data(), text.size()}, *compiled_);
}

Expression::Replacement Expression::replacement_of(std::string_view text) const {
  const int groups = compiled_->NumberOfCapturingGroups();
  Replacement made(1);
  for (std::string_view rest = text; !rest.empty();) {
    const char letter = rest.front();
    rest.remove_prefix(1);
    if (!is_one_of(letter, '\\', '$')) {
      made.back().text += letter;
      continue;
    }
    const bool whole = letter == '$' && rest.starts_with('&');
    if (!rest.empty() && rest.front() == letter) {
      made.back().text += letter;
      rest.remove_prefix(1);
    } else if (whole || (!rest.empty() && is_digit(rest.front()))) {
      const int group = whole ? 0 : take_group(rest, groups);
      if (whole) rest.remove_prefix(1);
      if (group > groups) {
        refuse("'" + std::string(text) + "' has group " + std::to_string(group) +
               ", the expression '" + compiled_->pattern() + "' has " + std::to_string(groups));
      }
      made.back().group = group;
      made.emplace_back();
    } else {
      refuse("behind '" + std::string(1, letter) + "' in '" + std::string(text) +
             "' stands no number of a group; write '" + std::string(2, letter) +
             "' for the character itself");
    }
  }
  return made;
}

std::string Expression::replaced(std::string_view text, const Replacement& by) const {
  const re2::StringPiece whole(text.data(), text.size());
  std::vector<re2::StringPiece> groups(
      static_cast<std::size_t>(compiled_->NumberOfCapturingGroups()) + 1);
  std::string made;
  std::size_t kept = 0;  // of the text, what is in `made` already
  for (std::size_t at = 0; at <= text.size();) {
    if (!compiled_->Match(whole, at, text.size(), RE2::UNANCHORED, groups.data(),
                          static_cast<int>(groups.size()))) {
      break;
    }
    const auto begin = static_cast<std::size_t>(groups[0].data() - text.data());
    made += text.substr(kept, begin - kept);
    for (const Part& part : by) {
      made += part.text;
      if (part.group < 0) continue;
      const re2::StringPiece& group = groups[static_cast<std::size_t>(part.group)];
      if (group.data() != nullptr) made.append(group.data(), group.size());
    }
    kept = begin + groups[0].size();
    at = groups[0].empty() ? next_letter(text, kept) : kept;
  }
  made += text.substr(kept);
  return made;
}

namespace {

using Codes = std::vector<std::uint32_t>;

// Gives `take` each character; false: the text is no UTF-8.
template <typename Take>
bool for_each_code(std::string_view text, const Take& take) {
  while (!text.empty()) {
    const Rune rune = first_rune(text);
    if (rune.length == 0 || is_surrogate(rune.code)) return false;
    take(rune.code);
    text.remove_prefix(rune.length);
  }
  return true;
}

std::optional<Codes> codes_of(std::string_view text) {
  Codes codes;
  const bool is_whole = for_each_code(text, [&](std::uint32_t code) { codes.push_back(code); });
  return is_whole ? std::optional(std::move(codes)) : std::nullopt;
}

Codes bytes_of(std::string_view text) {
  Codes codes;
  for (const char byte : text) codes.push_back(static_cast<unsigned char>(byte));
  return codes;
}

// Writes a glob as a regular expression, of which every character is a number.
class GlobTranslator {
 public:
  GlobTranslator(const Codes& glob, Expression::Letters letters)
      : glob_(glob), last_(letters == Expression::Letters::utf8 ? 0x10ffff : 0xff) {}

  std::string run() && {
    while (at_ < glob_.size()) {
      const std::uint32_t code = glob_[at_++];
      if (code == '*') {
        made_ += ".*";
      } else if (code == '?') {
        made_ += '.';
      } else if (code == '\\' && at_ == glob_.size()) {
        made_ += nothing();
      } else if (code == '\\') {
        made_ += letter(glob_[at_++]);
      } else if (code != '[' || !add_set()) {
        made_ += letter(code);
      }
    }
    return "(?s)" + made_;
  }

 private:
  static std::string letter(std::uint32_t code) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    std::string hex;
    for (; code > 0; code /= 16) hex.insert(hex.begin(), kDigits[code % 16]);
    return "\\x{" + (hex.empty() ? "0" : hex) + "}";
  }
  [[nodiscard]] std::string nothing() const { return "[^" + letter(0) + "-" + letter(last_) + "]"; }

  [[nodiscard]] bool is_at(std::size_t at, std::uint32_t code) const {
    return at < glob_.size() && glob_[at] == code;
  }

  // "[:alpha:]" in a set; nothing where none stands.
  std::string take_class(std::size_t& at) const {
    constexpr std::array<std::string_view, 12> kClasses{"alnum", "alpha", "blank", "cntrl",
                                                        "digit", "graph", "lower", "print",
                                                        "punct", "space", "upper", "xdigit"};
    for (const std::string_view name : kClasses) {
      const std::string text = "[:" + std::string(name) + ":]";
      if (at > glob_.size() || glob_.size() - at < text.size()) continue;
      if (std::equal(text.begin(), text.end(), glob_.begin() + static_cast<std::ptrdiff_t>(at))) {
        at += text.size();
        return text;
      }
    }
    return "";
  }

  // A character of a set, which may be behind `\`; nothing at the glob's end.
  std::optional<std::uint32_t> take_member(std::size_t& at) const {
    if (is_at(at, '\\')) ++at;
    if (at >= glob_.size()) return std::nullopt;
    return glob_[at++];
  }

  // What stands behind `[`. False: it has no end, and `[` is a character.
  bool add_set() {
    std::size_t at = at_;
    const bool is_other = is_at(at, '!') || is_at(at, '^');
    if (is_other) ++at;
    std::string members;
    for (bool is_first = true; is_first || !is_at(at, ']'); is_first = false) {
      if (const std::string name = take_class(at); !name.empty()) {
        members += name;
        continue;
      }
      const auto from = take_member(at);
      if (!from) return false;
      auto to = from;
      if (is_at(at, '-') && at + 1 < glob_.size() && glob_[at + 1] != ']') to = take_member(++at);
      if (!to) return false;
      if (*from <= *to) members += letter(*from) + "-" + letter(*to);
    }
    at_ = at + 1;
    if (members.empty()) {
      made_ += is_other ? "." : nothing();
    } else {
      made_ += (is_other ? "[^" : "[") + members + "]";
    }
    return true;
  }

  const Codes& glob_;
  std::uint32_t last_;
  std::size_t at_ = 0;
  std::string made_;
};

std::optional<Expression> letters_of(std::string_view glob) {
  const auto codes = codes_of(glob);
  if (!codes) return std::nullopt;
  return Expression(GlobTranslator(*codes, Expression::Letters::utf8).run());
}

// The user has not written the expression that may be too large.
template <typename Make>
auto compiled_glob(std::string_view glob, const Make& make) {
  try {
    return make();
  } catch (const Error&) {
    throw Error(ErrorCode::limit,
                "a glob of " + std::to_string(glob.size()) + " bytes is too long");
  }
}

}  // namespace

Glob::Glob(std::string_view glob)
    : letters_(compiled_glob(glob, [&] { return letters_of(glob); })),
      bytes_(compiled_glob(glob, [&] {
        return Expression(GlobTranslator(bytes_of(glob), Expression::Letters::bytes).run(),
                          Expression::Letters::bytes);
      })) {}

bool Glob::fits(std::string_view text) const {
  const bool is_utf8 = letters_ && for_each_code(text, [](std::uint32_t) {});
  return is_utf8 ? letters_->matches(text) : bytes_.matches(text);
}

}  // namespace tessera
