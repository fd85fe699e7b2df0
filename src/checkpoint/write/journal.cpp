#include "checkpoint/write/journal.h"

#include <unistd.h>

#include <array>
#include <cerrno>
#include <sstream>
#include <string_view>

#include <nlohmann/json.hpp>

#include "base/digest.h"
#include "storage/posix/system.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kVersion = 1;
constexpr std::size_t kStamp = kDigestDigits + 1;  // and a space

Json to_json(const JournalUnit& unit) {
  Json open = Json::array();
  for (const OpenCheck& check : unit.open) {
    Json runs = Json::array();
    for (const ReadRun& run : check.runs) {
      runs.push_back(Json::array({run.at, run.size, run.crc}));
    }
    open.push_back(Json::array({check.storage, runs}));
  }
  return Json::array(
      {"unit", unit.file, unit.what, unit.at, unit.size, unit.digest, unit.crc, open});
}

JournalUnit unit_of(const Json& row) {
  JournalUnit unit;
  unit.file = row.at(1).get<std::string>();
  unit.what = row.at(2).get<std::uint64_t>();
  unit.at = row.at(3).get<std::uint64_t>();
  unit.size = row.at(4).get<std::uint64_t>();
  unit.digest = row.at(5).get<std::uint64_t>();
  unit.crc = row.at(6).get<std::uint32_t>();
  for (const Json& check : row.at(7)) {
    OpenCheck open{check.at(0).get<std::uint64_t>(), {}};
    for (const Json& run : check.at(1)) {
      open.runs.push_back({run.at(0).get<std::uint64_t>(), run.at(1).get<std::uint64_t>(),
                           run.at(2).get<std::uint32_t>()});
    }
    unit.open.push_back(std::move(open));
  }
  return unit;
}

std::string content(int fd, const std::string& path) {
  std::string text;
  std::array<char, 1 << 16> part{};
  for (;;) {
    const ssize_t got = uninterrupted(
        [&] { return ::pread(fd, part.data(), part.size(), static_cast<off_t>(text.size())); });
    if (got < 0) throw_errno(errno, "read", path);
    if (got == 0) return text;
    text.append(part.data(), static_cast<std::size_t>(got));
  }
}

}  // namespace

Journal::Journal(int fd, std::string path, std::uint64_t fingerprint, const std::string& attempt)
    : fd_(fd), path_(std::move(path)), fingerprint_(fingerprint) {
  const std::string text = content(fd_, path_);
  try {
    read(text);
  } catch (const Json::exception&) {
    // The digests are right and the content is not: nobody's journal.
    goes_on_ = false;
    units_.clear();
    published_.reset();
  }
  was_foreign_ = !goes_on_ && !text.empty();
  if (!goes_on_) {
    begin(attempt);
  } else if (!text.ends_with('\n')) {
    append_line("");  // what was torn off ends here
  }
}

void Journal::read(const std::string& text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const std::string payload = payload_of(line);
    if (!payload.empty()) read_row(payload);
    if (!goes_on_) return;  // the first line is what binds the rest to this conversion
  }
}

std::string Journal::payload_of(const std::string& line) const {
  if (line.size() < kStamp) return {};
  std::string payload = line.substr(kStamp);
  return line == stamp(payload) ? payload : std::string();
}

void Journal::read_row(const std::string& payload) {
  const Json row = Json::parse(payload);
  const auto kind = row.at(0).get<std::string>();
  if (!goes_on_) {
    if (kind != "begin" || row.at(1) != kVersion) return;
    attempt_ = row.at(2).get<std::string>();
    goes_on_ = true;
  } else if (kind == "unit") {
    JournalUnit unit = unit_of(row);
    units_.insert_or_assign({unit.file, unit.at}, std::move(unit));
  } else if (kind == "published") {
    published_ = row.at(1).get<std::uint64_t>();
  }
}

void Journal::begin(const std::string& attempt) {
  if (::ftruncate(fd_, 0) != 0) throw_errno(errno, "truncate", path_);
  attempt_ = attempt;
  append_line(Json::array({"begin", kVersion, attempt}).dump());
}

const JournalUnit* Journal::find(const std::string& file, std::uint64_t at) const {
  const auto found = units_.find({file, at});
  return found == units_.end() ? nullptr : &found->second;
}

void Journal::append(const JournalUnit& unit) {
  // A name that is not UTF-8 is not found again, and its file made anew.
  append_line(to_json(unit).dump(-1, ' ', true, Json::error_handler_t::replace));
}

void Journal::append_published(std::uint64_t identity) {
  append_line(Json::array({"published", identity}).dump());
  if (::fdatasync(fd_) != 0) throw_errno(errno, "fsync", path_);
}

void Journal::append_line(const std::string& payload) {
  const std::string line = (payload.empty() ? "" : stamp(payload)) + "\n";
  const std::lock_guard lock(mutex_);
  for (std::string_view rest = line; !rest.empty();) {
    const ssize_t wrote = uninterrupted([&] { return ::write(fd_, rest.data(), rest.size()); });
    if (wrote < 0) throw_errno(errno, "write", path_);
    rest.remove_prefix(static_cast<std::size_t>(wrote));
  }
}

std::string Journal::stamp(const std::string& payload) const {
  const std::string guarded = std::to_string(fingerprint_) + " " + payload;
  return digest_text(digest64(std::as_bytes(std::span(guarded)))) + " " + payload;
}

}  // namespace tessera
