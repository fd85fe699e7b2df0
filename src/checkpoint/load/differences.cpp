#include "checkpoint/load/differences.h"

#include <algorithm>
#include <cstddef>
#include <string_view>
#include <utility>

#include "value/render.h"

namespace tessera {
namespace {

constexpr std::size_t kMostNamed = 100;
constexpr std::size_t kLongestKey = 200;  // bytes

struct Difference {
  std::string key;
  ErrorCode code;
  std::string reason;  // empty: there is no more to say
};

// Differences of one sort, and what is said of them.
struct Sort {
  std::string alone;         // what is said of the only one; empty: its reason
  std::string one, several;  // "1 key ...", "2 keys ..."
  std::vector<Difference> differences;
};

// Its keys, as long as `left` lasts.
std::string text_of(const Sort& sort, std::size_t& left) {
  const std::size_t count = sort.differences.size();
  const std::size_t named = std::min(count, std::exchange(left, left - std::min(left, count)));
  std::string text = std::to_string(count) + (count == 1 ? sort.one : sort.several);
  for (std::size_t i = 0; i < named; ++i) {
    const Difference& difference = sort.differences[i];
    text += (i == 0 ? ": '" : ", '") + printable(difference.key, kLongestKey) + "'";
    if (!difference.reason.empty()) text += " (" + difference.reason + ")";
  }
  if (named > 0 && named < count) text += ", and " + std::to_string(count - named) + " more";
  return text;
}

ErrorCode shared_code(const std::vector<Sort>& sorts) {
  const ErrorCode first = sorts.front().differences.front().code;
  const bool shared = std::ranges::all_of(sorts, [first](const Sort& sort) {
    return std::ranges::all_of(sort.differences, [first](const Difference& difference) {
      return difference.code == first;
    });
  });
  return shared ? first : ErrorCode::mismatch;
}

std::string text_of(const std::vector<Sort>& sorts) {
  const Sort& first = sorts.front();
  if (sorts.size() == 1 && first.differences.size() == 1) {
    const std::string& reason = first.differences.front().reason;
    if (first.alone.empty()) return reason;
    return reason.empty() ? first.alone : first.alone + " (" + reason + ")";
  }
  std::size_t left = kMostNamed;
  std::string text;
  for (const Sort& sort : sorts) {
    if (!text.empty()) text += "; ";
    text += text_of(sort, left);
  }
  return text;
}

std::string_view last_step(std::string_view key) {
  return key.substr(key.rfind('.') + 1);
}

// Of `keys` the one with the longest end in common with `key`, of its whole last step at least;
// empty: none.
std::string_view nearest(std::string_view key, const std::vector<std::string>& keys) {
  std::string_view found;
  std::ptrdiff_t longest = 0;
  for (const std::string& other : keys) {
    if (last_step(other) != last_step(key)) continue;
    const auto end = std::ranges::mismatch(key.rbegin(), key.rend(), other.rbegin(), other.rend());
    const std::ptrdiff_t shared = end.in1 - key.rbegin();
    if (shared > longest) {
      longest = shared;
      found = other;
    }
  }
  return found;
}

// What else is known of a missing key.
std::string sought_text(const std::string& key, const std::string& sought,
                        const std::vector<std::string>& left) {
  const auto quoted = [](std::string_view text) {
    return "'" + printable(text, kLongestKey) + "'";
  };
  std::string text = key == sought ? "" : "sought as " + quoted(sought);
  if (const std::string_view near = nearest(sought, left); !near.empty())
    text += (text.empty() ? "it has " : ", it has ") + quoted(near);
  return text;
}

}  // namespace

void Differences::add_missing(std::string key, std::string sought) {
  missing_.push_back({std::move(key), std::move(sought)});
}

void Differences::add_unfit(std::string key, const Error& why) {
  unfit_.push_back({std::move(key), why.code(), why.message()});
}

std::optional<Error> Differences::refusal(const LoadOptions& options) const {
  std::vector<Sort> sorts;
  if (options.missing == OnDifference::refuse) {
    sorts.push_back({"the checkpoint has no such key",
                     " key is not in the checkpoint",
                     " keys are not in the checkpoint",
                     {}});
    const std::vector<std::string> none;
    const auto& others = missing_.size() <= kMostNamed ? left_ : none;  // each with each
    for (const Missing& missing : missing_) {
      sorts.back().differences.push_back(
          {missing.key, ErrorCode::not_found, sought_text(missing.key, missing.sought, others)});
    }
  }
  if (options.unfit == OnDifference::refuse) {
    sorts.push_back({"", " key does not fit", " keys do not fit", {}});
    for (const Unfit& unfit : unfit_)
      sorts.back().differences.push_back({unfit.key, unfit.code, unfit.reason});
  }
  if (options.extra == OnDifference::refuse) {
    sorts.push_back({"the checkpoint has this key, the tree does not",
                     " key is in the checkpoint alone",
                     " keys are in the checkpoint alone",
                     {}});
    for (const std::string& key : extra_)
      sorts.back().differences.push_back({key, ErrorCode::mismatch, ""});
  }
  std::erase_if(sorts, [](const Sort& sort) { return sort.differences.empty(); });
  if (sorts.empty()) return std::nullopt;
  for (Sort& sort : sorts) std::ranges::sort(sort.differences, {}, &Difference::key);
  return Error(shared_code(sorts), text_of(sorts)).at_key(sorts.front().differences.front().key);
}

void Differences::fill(LoadReport& report) const {
  for (const Missing& missing : missing_) report.missing.push_back(missing.key);
  std::ranges::sort(report.missing);
  for (const Unfit& unfit : unfit_) report.unfit.push_back({unfit.key, unfit.reason});
  std::ranges::sort(report.unfit, {}, &UnfitKey::key);
  report.extra = extra_;
  std::ranges::sort(report.extra);
}

}  // namespace tessera
