#include "storage/cache/block_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <ctime>
#include <span>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/log.h"
#include "base/random_id.h"
#include "base/sha256.h"
#include "storage/cache/block_file.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::time_t kAbandoned = 3600;  // seconds, after which nobody writes a temporary file

void write_whole(const Fd& fd, ByteView bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t done = transferred([&] { return ::write(fd.get(), bytes.data(), bytes.size()); });
    if (done < 0) throw_errno(errno, "write", path);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

bool is_key(std::string_view name) {
  return name.size() == kSha256Digits &&
         name.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

bool is_temporary(std::string_view name) {
  constexpr std::string_view kEnd = ".tmp";
  return name.size() == 1 + kAttemptDigits + kEnd.size() && name.starts_with('.') &&
         name.ends_with(kEnd) && is_attempt(name.substr(1, kAttemptDigits));
}

void remove_if_abandoned(const std::string& path, const CacheDirectory& owner) {
  const Fd fd = opened(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  struct stat status {};
  if (fd && owner.owns_file(fd.get()) && ::fstat(fd.get(), &status) == 0 &&
      std::time(nullptr) - status.st_mtime > kAbandoned)
    (void)::unlink(path.c_str());
}

struct Kept {
  std::time_t used;
  std::uint64_t bytes;
  std::string path;
};

// All blocks. Temporary files that nobody writes any more go.
std::vector<Kept> kept_in(const CacheDirectory& directory) {
  std::vector<Kept> kept;
  for (const DirectoryEntry& entry : readable_entries_of(directory.path())) {
    if (is_temporary(entry.name)) remove_if_abandoned(entry.path, directory);
    if (!is_key(entry.name) || !directory.owns_directory(entry.path)) continue;
    for (const DirectoryEntry& block : readable_entries_of(entry.path)) {
      const BlockFile file(block.path, {entry.name, block.name}, directory);
      if (file.is_sealed()) kept.push_back({file.used(), file.file_size(), block.path});
    }
  }
  return kept;
}

}  // namespace

BlockCache::BlockCache(const std::string& directory, std::uint64_t most_bytes)
    : directory_(directory), most_bytes_(most_bytes) {
  (void)directory_.is_there();
}

std::string BlockCache::key_of(const ByteSource& object) {
  return sha256_text(object.identity() + '\0' + std::to_string(object.size()));
}

std::string BlockCache::directory_of_key(const std::string& key) const {
  return directory_.path() + "/" + key;
}

bool BlockCache::read(const Place& place, std::uint64_t within, MutableByteView out) noexcept {
  try {
    return read_block(place, within, out);
  } catch (const std::exception& error) {
    give_up(error);
    return false;
  }
}

bool BlockCache::read_block(const Place& place, std::uint64_t within, MutableByteView out) const {
  const std::string of_key = directory_of_key(place.key);
  if (!directory_.is_there() || !directory_.owns_directory(of_key)) return false;
  const BlockName name{place.key, std::to_string(place.block)};
  const std::string path = of_key + "/" + name.block;
  const BlockFile file(path, name, directory_);
  if (!file.is_sealed()) return false;
  if (file.size() == place.size && file.read(within, out)) {
    file.note_use();
    return true;
  }
  (void)::unlink(path.c_str());
  return false;
}

void BlockCache::keep(const Place& place, ByteView bytes) noexcept {
  if (is_given_up_ || bytes.size() > most_bytes_) return;
  try {
    write(place, bytes);
    if (bytes_ > most_bytes_ || !is_counted_) make_room();
  } catch (const std::exception& error) {
    give_up(error);
  }
}

void BlockCache::give_up(const std::exception& error) noexcept {
  if (is_given_up_.exchange(true)) return;
  try {
    log(LogLevel::warning, "nothing more is kept in the local cache: " + std::string(error.what()));
  } catch (const std::exception&) {
    return;  // without memory for the text nobody is told
  }
}

void BlockCache::write(const Place& place, ByteView bytes) {
  directory_.make();
  const std::string of_key = directory_of_key(place.key);
  // Whatever the umask is: what others may write into is not ours.
  if (::mkdir(of_key.c_str(), S_IRWXU) != 0 && errno != EEXIST)
    throw_errno(errno, "make directory", of_key);
  const BlockName name{place.key, std::to_string(place.block)};
  const std::string path = of_key + "/" + name.block;
  if (!directory_.owns_directory(of_key) || BlockFile(path, name, directory_).is_others()) return;
  const std::string temporary = directory_.path() + "/." + random_attempt() + ".tmp";
  const Fd fd(
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!fd) throw_errno(errno, "create", temporary);
  const std::vector<std::uint64_t> trailer = block_trailer(name, bytes);
  try {
    write_whole(fd, bytes, temporary);
    write_whole(fd, std::as_bytes(std::span(trailer)), temporary);
    if (::rename(temporary.c_str(), path.c_str()) != 0) throw_errno(errno, "rename", path);
  } catch (...) {
    (void)::unlink(temporary.c_str());
    throw;
  }
  bytes_ += bytes.size();
}

// Another process may do the same: one of them is enough.
void BlockCache::make_room() {
  const std::string path = directory_.path() + "/.lock";
  Fd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!fd) throw_errno(errno, "open", path);
  if (try_lock(fd.get()) != Locked::yes) return;
  const LockedFd lock(std::move(fd));
  std::vector<Kept> kept = kept_in(directory_);
  std::uint64_t bytes = 0;
  for (const Kept& block : kept) bytes += block.bytes;
  std::ranges::sort(kept, {}, &Kept::used);
  const std::uint64_t wanted = bytes > most_bytes_ ? most_bytes_ / 10 * 9 : bytes;
  for (const Kept& block : kept) {
    if (bytes <= wanted) break;
    if (::unlink(block.path.c_str()) != 0) continue;
    bytes -= block.bytes;
    (void)::rmdir(directory_of(block.path).c_str());  // if it was the last one
  }
  bytes_ = bytes;
  is_counted_ = true;
}

}  // namespace tessera
