#include "base/expression.h"

#include <re2/re2.h>

#include <optional>

#include "base/text.h"
#include "tessera/error.h"

namespace tessera {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw Error(ErrorCode::invalid_argument, what);
}

RE2::Options options() {
  RE2::Options made;
  made.set_log_errors(false);  // a library never prints
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

Expression::Expression(const std::string& text)
    : compiled_(std::make_unique<RE2>(text, options())) {
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

}  // namespace tessera
