#include "storage/cache/block_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <span>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/fd.h"
#include "base/log.h"
#include "base/random_id.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kUnit = 1U << 20U;  // has a digest
constexpr std::uint64_t kSeal = 0x7e55e4aca0c4e001;
constexpr std::time_t kAbandoned = 3600;  // seconds, after which nobody writes a temporary file
constexpr std::time_t kFresh = 60;        // seconds, in which a use is not noted again

std::uint64_t units_of(std::uint64_t size) {
  return (size + kUnit - 1) / kUnit;
}

// The digests of the units, and the seal.
std::vector<std::uint64_t> trailer_of(ByteView bytes) {
  std::vector<std::uint64_t> trailer;
  for (std::size_t at = 0; at < bytes.size(); at += kUnit)
    trailer.push_back(digest64(bytes.subspan(at, std::min<std::size_t>(kUnit, bytes.size() - at))));
  trailer.push_back(kSeal ^ bytes.size());
  return trailer;
}

bool read_whole(const Fd& fd, std::uint64_t offset, MutableByteView out) {
  while (!out.empty()) {
    const ssize_t got = transferred(
        [&] { return ::pread(fd.get(), out.data(), out.size(), static_cast<off_t>(offset)); });
    if (got <= 0) return false;
    out = out.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
  return true;
}

void write_whole(const Fd& fd, ByteView bytes, const std::string& path) {
  while (!bytes.empty()) {
    const ssize_t done = transferred([&] { return ::write(fd.get(), bytes.data(), bytes.size()); });
    if (done < 0) throw_errno(errno, "write", path);
    bytes = bytes.subspan(static_cast<std::size_t>(done));
  }
}

// One block's file, if it is whole.
class BlockFile {
 public:
  BlockFile(const std::string& path, std::uint64_t size)
      : fd_(opened(path, O_RDONLY | O_NOFOLLOW)), size_(size), trailer_(units_of(size) + 1) {
    struct stat status {};
    const std::uint64_t trailer_bytes = trailer_.size() * sizeof(std::uint64_t);
    is_whole_ = fd_ && ::fstat(fd_.get(), &status) == 0 &&
                static_cast<std::uint64_t>(status.st_size) == size + trailer_bytes &&
                read_whole(fd_, size, std::as_writable_bytes(std::span(trailer_))) &&
                trailer_.back() == (kSeal ^ size);
    if (is_whole_ && std::time(nullptr) - status.st_mtime > kFresh)
      (void)::futimens(fd_.get(), nullptr);  // it was used
  }

  [[nodiscard]] bool is_there() const { return static_cast<bool>(fd_); }
  [[nodiscard]] bool is_whole() const { return is_whole_; }

  [[nodiscard]] bool read(std::uint64_t within, MutableByteView out) const {
    std::vector<std::byte> scratch;
    while (!out.empty()) {
      const std::uint64_t unit = within / kUnit;
      const std::uint64_t begin = unit * kUnit;
      const auto size = static_cast<std::size_t>(std::min(kUnit, size_ - begin));
      const auto from = static_cast<std::size_t>(within - begin);
      const auto part = out.first(std::min(out.size(), size - from));
      MutableByteView whole = part;
      if (part.size() < size) {
        scratch.resize(size);
        whole = scratch;
      }
      if (!read_whole(fd_, begin, whole) || digest64(whole) != trailer_[unit]) return false;
      if (part.size() < size) std::memcpy(part.data(), scratch.data() + from, part.size());
      out = out.subspan(part.size());
      within += part.size();
    }
    return true;
  }

 private:
  Fd fd_;
  std::uint64_t size_;
  std::vector<std::uint64_t> trailer_;
  bool is_whole_ = false;
};

struct Kept {
  std::time_t used;
  std::uint64_t bytes;
  std::string path;
};

bool is_temporary(const std::string& name) {
  return name.starts_with('.') && name.ends_with(".tmp");
}

// All blocks. Temporary files that nobody writes any more go.
std::vector<Kept> kept_in(const std::string& directory) {
  std::vector<Kept> kept;
  struct stat status {};
  for (const DirectoryEntry& entry : readable_entries_of(directory)) {
    if (is_temporary(entry.name) && ::stat(entry.path.c_str(), &status) == 0 &&
        std::time(nullptr) - status.st_mtime > kAbandoned)
      (void)::unlink(entry.path.c_str());
    if (!entry.is_directory) continue;
    for (const DirectoryEntry& block : readable_entries_of(entry.path)) {
      if (::stat(block.path.c_str(), &status) == 0)
        kept.push_back({status.st_mtime, static_cast<std::uint64_t>(status.st_size), block.path});
    }
  }
  return kept;
}

}  // namespace

BlockCache::BlockCache(std::string directory, std::uint64_t most_bytes)
    : directory_(std::move(directory)), most_bytes_(most_bytes) {}

std::string BlockCache::key_of(const ByteSource& object) {
  const std::string text =
      object.name() + '\0' + object.version() + '\0' + std::to_string(object.size());
  const auto digest = [](const std::string& of) {
    return digest_text(digest64(std::as_bytes(std::span(of))));
  };
  return digest(text) + digest("again" + text);
}

std::string BlockCache::path_of(const Place& place) const {
  return directory_ + "/" + place.key + "/" + std::to_string(place.block);
}

bool BlockCache::read(const Place& place, std::uint64_t within, MutableByteView out) const {
  const std::string path = path_of(place);
  const BlockFile file(path, place.size);
  if (file.is_whole() && file.read(within, out)) return true;
  if (file.is_there()) (void)::unlink(path.c_str());
  return false;
}

void BlockCache::keep(const Place& place, ByteView bytes) noexcept {
  if (is_given_up_ || bytes.size() > most_bytes_) return;
  try {
    write(place, bytes);
    if (bytes_ > most_bytes_ || !is_counted_) make_room();
  } catch (const std::exception& error) {
    if (!is_given_up_.exchange(true))
      log(LogLevel::warning,
          "nothing more is kept in the local cache: " + std::string(error.what()));
  }
}

void BlockCache::write(const Place& place, ByteView bytes) {
  const std::string path = path_of(place);
  make_directories(directory_of(path));
  const std::string temporary = directory_ + "/." + random_attempt() + ".tmp";
  const Fd fd(
      ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!fd) throw_errno(errno, "create", temporary);
  const std::vector<std::uint64_t> trailer = trailer_of(bytes);
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
  const std::string path = directory_ + "/.lock";
  const Fd lock(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, S_IRUSR | S_IWUSR));
  if (!lock) throw_errno(errno, "open", path);
  if (try_lock(lock.get()) != Locked::yes) return;
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
