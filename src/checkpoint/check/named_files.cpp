#include "checkpoint/check/named_files.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <filesystem>
#include <optional>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "base/sha.h"
#include "checkpoint/check/saved_state.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kHashedAtOnce = 1 << 20;  // bytes
constexpr std::uint64_t kRecordLimit = 4096;    // bytes; a record has three short lines

bool is_digest(std::string_view text) {
  const bool is_long = text.size() == kSha256Digits || text.size() == kSha1Digits;
  return is_long && text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

// What a file is to be, and who says so.
struct Naming {
  std::string digest, by;
};

std::optional<Naming> naming_of(std::string digest, std::string by) {
  if (!is_digest(digest)) return std::nullopt;
  return Naming{std::move(digest), std::move(by)};
}

// By its own name in a cache's directory of blobs, or that of the blob that it is a link to.
std::optional<Naming> by_blob(const fs::path& file) {
  std::error_code error;
  const fs::path blob = fs::canonical(file, error);
  if (error || blob.parent_path().filename() != "blobs") return std::nullopt;
  return naming_of(blob.filename().string(), blob.string());
}

// A record's lines: the commit, the digest, and the seconds since 1970 when it was written.
std::vector<std::string> lines_of(const std::vector<std::byte>& bytes) {
  std::istringstream text(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
  std::vector<std::string> lines;
  for (std::string line; std::getline(text, line);) lines.push_back(std::move(line));
  return lines;
}

// Whether the file was written behind its record, which then speaks of what was there before. As
// the Hub's own client has it, a second is none: clocks of file systems are coarse.
bool is_outdated(const std::string& seconds, const fs::path& file) {
  double recorded = 0;
  const auto [end, error] =
      std::from_chars(seconds.data(), seconds.data() + seconds.size(), recorded);
  std::error_code none;
  const auto written = fs::last_write_time(file, none);
  if (error != std::errc() || none) return true;
  const std::chrono::duration<double> since =
      std::chrono::file_clock::to_sys(written).time_since_epoch();
  return since.count() - 1 > recorded;
}

// By the record that a download into this directory has left of the file.
std::optional<Naming> by_record(const Store& store, const std::string& name) {
  const auto source = open_if_there(store, ".cache/huggingface/download/" + name + ".metadata");
  if (!source || source->size() > kRecordLimit) return std::nullopt;
  const auto lines = lines_of(read_all(*source, kRecordLimit));
  if (lines.size() < 3 || is_outdated(lines[2], fs::path(store.name()) / name)) return std::nullopt;
  return naming_of(lines[1], source->name());
}

std::optional<Naming> naming_of_file(const Store& store, const std::string& name) {
  if (scheme_of(store.name()) == "hf")
    return naming_of(store.open(name)->version(), "the Hugging Face Hub");
  if (is_remote(store.name())) return std::nullopt;
  auto blob = by_blob(fs::path(store.name()) / name);
  return blob ? std::move(blob) : by_record(store, name);
}

}  // namespace

CheckedBy NamedFile::by() const {
  return digest.size() == kSha256Digits ? CheckedBy::sha256 : CheckedBy::git_sha1;
}

std::vector<NamedFile> named_files(const Checkpoint& checkpoint) {
  std::vector<NamedFile> named;
  if (!checkpoint.store) return named;
  const SourceByName sources = sources_of(checkpoint);
  for (const ObjectInfo& file : checkpoint.files) {
    auto naming = naming_of_file(*checkpoint.store, file.name);
    if (!naming) continue;
    const auto whole = checkpoint.store->open(file.name);
    const auto source = sources.find(whole->name());
    if (source == sources.end()) continue;
    // Tensors may lie in less: bytes behind their end are of the file, too.
    const bool is_all = source->second->size() == whole->size();
    named.push_back(
        {is_all ? source->second : whole, std::move(naming->digest), std::move(naming->by)});
  }
  return named;
}

std::uint64_t require_name(const NamedFile& file, const std::stop_token& stop) {
  const bool is_git = file.by() == CheckedBy::git_sha1;
  const std::uint64_t size = file.source->size();
  RunningSha sha(is_git ? Sha::sha1 : Sha::sha256);
  const std::string head = "blob " + std::to_string(size) + '\0';
  if (is_git) sha.add(std::as_bytes(std::span(head)));
  std::vector<std::byte> window(kHashedAtOnce);
  for (std::uint64_t at = 0; at < size; at += window.size()) {
    require_going_on(stop);
    const auto part = MutableByteView(window).first(
        static_cast<std::size_t>(std::min<std::uint64_t>(window.size(), size - at)));
    file.source->read_at(at, part);
    sha.add(part);
  }
  const std::string found = sha.text();
  if (found == file.digest) return size;
  throw Error(ErrorCode::corrupt, "the file's " +
                                      std::string(is_git ? "digest by git" : "SHA-256") + " is " +
                                      found + ", expected " + file.digest + " by " + file.named_by)
      .at_path(file.source->name());
}

}  // namespace tessera
