#include "tessera/error.h"

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

namespace tessera {
namespace {

constexpr std::array<std::string_view, 15> kNames = {
    "invalid_argument", "not_found", "already_exists", "corrupt",  "incomplete",
    "unsupported",      "unsafe",    "limit",          "conflict", "io",
    "out_of_space",     "timeout",   "peer_failed",    "mismatch", "cancelled",
};

const std::map<int, Error> kNoPeers;

// One cause often fails every rank alike: it is said once, with all its ranks.
std::string causes_of(const std::map<int, Error>& failures) {
  std::vector<std::pair<std::string, std::string>> causes;  // text, ranks
  for (const auto& [rank, failure] : failures) {
    const auto known =
        std::find_if(causes.begin(), causes.end(),
                     [&failure = failure](auto& cause) { return cause.first == failure.what(); });
    if (known == causes.end()) {
      causes.emplace_back(failure.what(), "rank " + std::to_string(rank));
    } else {
      known->second += ", " + std::to_string(rank);
    }
  }
  std::string text;
  for (const auto& [cause, ranks] : causes) {
    if (!text.empty()) text += "; ";
    text.append(ranks).append(": ").append(cause);
  }
  return text;
}

}  // namespace

std::string_view to_string(ErrorCode code) noexcept {
  const auto index = static_cast<std::size_t>(code);
  return index < kNames.size() ? kNames[index] : std::string_view("unknown");
}

Error::Error(ErrorCode code, std::string what_failed)
    : code_(code), message_(std::move(what_failed)) {
  render();
}

Error& Error::at_path(std::string path) {
  if (path_.empty()) path_ = std::move(path);
  render();
  return *this;
}

Error& Error::at_key(std::string key) {
  if (key_.empty()) key_ = std::move(key);
  render();
  return *this;
}

Error& Error::at_offset(std::uint64_t offset) {
  if (!offset_) offset_ = offset;
  render();
  return *this;
}

Error& Error::while_doing(std::string operation) {
  operation_ = operation_.empty() ? std::move(operation) : operation_ + ", " + operation;
  render();
  return *this;
}

Error& Error::as_no_checkpoint() {
  is_no_checkpoint_ = true;
  return *this;
}

const std::map<int, Error>& Error::peers() const noexcept {
  return peers_ ? *peers_ : kNoPeers;
}

Error Error::from_peers(std::map<int, Error> failures, int ranks, std::size_t unnamed) {
  const Error& first = failures.begin()->second;
  Error error = first;
  error.told_.clear();
  if (ranks > 1) {
    const auto all = [&failures](const auto& same) {
      return std::all_of(failures.begin(), failures.end(),
                         [&same](const auto& failure) { return same(failure.second); });
    };
    const bool one_code = all([&](const Error& e) { return e.code() == first.code(); });
    std::string causes = causes_of(failures);
    if (unnamed > 0) causes += "; " + std::to_string(unnamed) + " more ranks failed";
    error = Error(one_code ? first.code() : ErrorCode::peer_failed, std::move(causes));
    if (all([&](const Error& e) { return e.path() == first.path(); })) error.path_ = first.path();
    if (all([&](const Error& e) { return e.key() == first.key(); })) error.key_ = first.key();
    if (all([&](const Error& e) { return e.offset() == first.offset(); }))
      error.offset_ = first.offset();
    error.is_no_checkpoint_ = unnamed == 0 && failures.contains(0) &&
                              all([](const Error& e) { return e.is_no_checkpoint(); });
    error.told_ = error.where();
  }
  error.peers_ = std::make_shared<const std::map<int, Error>>(std::move(failures));
  error.render();
  return error;
}

std::string Error::where() const {
  std::string text;
  const auto add = [&text](const std::string& part) {
    if (!text.empty()) text += ", ";
    text += part;
  };
  if (!path_.empty()) add(path_);
  if (!key_.empty()) add("key '" + key_ + "'");
  if (offset_) add("offset " + std::to_string(*offset_));
  return text;
}

void Error::render() {
  line_ = std::string(to_string(code_)) + ": " + message_;
  if (const std::string where = this->where(); where != told_) line_ += " [" + where + "]";
  if (!operation_.empty()) line_ += " (" + operation_ + ")";
  // what() would end there, and be cut.
  for (std::size_t at = line_.find('\0'); at != std::string::npos; at = line_.find('\0', at))
    line_.replace(at, 1, "\\x00");
}

}  // namespace tessera
