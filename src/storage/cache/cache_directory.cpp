#include "storage/cache/cache_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <span>
#include <string_view>
#include <vector>

#include "storage/posix/atomic_file.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

constexpr const char* kMarker = "CACHEDIR.TAG";
// The first line is what everybody's cache directories have (https://bford.info/cachedir/).
constexpr std::string_view kStart =
    "Signature: 8a477f597d28d172789f06886806bc55\n"
    "# Blocks of objects that Tessera has read from URLs. All of it may be deleted at any time.\n"
    "# Version ";
constexpr std::string_view kVersion = "1\n";
constexpr std::uint64_t kLongestMarker = 4096;

[[noreturn]] void refuse(ErrorCode code, const std::string& why, const std::string& path) {
  throw Error(code, "the local cache is not used: " + why).at_path(path);
}

std::string marker() {
  return std::string(kStart) + std::string(kVersion);
}

}  // namespace

CacheDirectory::CacheDirectory(const std::string& given)
    : path_(given + (given.ends_with('/') ? "" : "/") + "tessera-blocks-" +
            std::to_string(::geteuid())) {}

bool CacheDirectory::owns(uid_t owner, mode_t mode) const {
  return owner_ == static_cast<std::int64_t>(owner) && (mode & (S_IWGRP | S_IWOTH)) == 0;
}

bool CacheDirectory::owns_directory(const std::string& path) const {
  struct stat status {};
  return ::lstat(path.c_str(), &status) == 0 && S_ISDIR(status.st_mode) &&
         owns(status.st_uid, status.st_mode);
}

bool CacheDirectory::owns_file(int fd) const {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode) &&
         owns(status.st_uid, status.st_mode);
}

bool CacheDirectory::is_there() const {
  struct stat status {};
  if (::lstat(path_.c_str(), &status) != 0) return false;  // whoever makes it hears why
  if (!S_ISDIR(status.st_mode)) refuse(ErrorCode::unsafe, "this is no directory", path_);
  if (owner_ < 0) owner_ = status.st_uid == ::geteuid() ? status.st_uid : owner_of_ours(path_);
  if (!owns(status.st_uid, status.st_mode)) {
    refuse(ErrorCode::unsafe,
           "the directory belongs to user " + std::to_string(status.st_uid) +
               ", or others than its owner may write into it",
           path_);
  }
  if (is_marked_) return true;
  if (entries_of(path_).empty()) return false;
  require_marker();
  is_marked_ = true;
  return true;
}

void CacheDirectory::require_marker() const {
  std::string found;
  try {
    const auto bytes = read_all(*posix_store(path_)->open(kMarker), kLongestMarker);
    found.assign(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  } catch (const Error& error) {
    refuse(ErrorCode::unsafe, "the directory has no marker of one: " + std::string(error.what()),
           path_);
  }
  if (found == marker()) return;
  if (found.starts_with(kStart))
    refuse(ErrorCode::unsupported, "the directory is one of another version of Tessera", path_);
  refuse(ErrorCode::unsafe, std::string("its ") + kMarker + " is another program's", path_);
}

// It appears with its marker. Somebody else may be faster.
void CacheDirectory::make() const {
  if (is_there()) return;
  try {
    ReplacedDirectory made(path_, IfExists::fail);
    if (::chmod(made.working().c_str(), S_IRWXU) != 0)
      throw_errno(errno, "set the mode", made.working());
    const std::string text = marker();
    AtomicFile file(made.working() + "/" + kMarker, IfExists::fail, text.size());
    file.write_at(0, std::as_bytes(std::span(text)));
    file.commit();
    made.commit();
  } catch (const Error& error) {
    if (error.code() != ErrorCode::already_exists) throw;
  }
  if (!is_there()) throw Error(ErrorCode::conflict, "others delete the cache").at_path(path_);
}

}  // namespace tessera
