#include "storage/cache/block_cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/digest.h"
#include "base/log.h"
#include "base/process.h"
#include "base/sha.h"
#include "io/source.h"
#include "storage/forwarding_store.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/lock.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "tessera/error.h"
#include "tessera/storage.h"
#include "tessera/stores.h"

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

namespace {

constexpr std::uint64_t kUnit = 1U << 20U;  // has a digest
constexpr std::uint64_t kMostUnits = 4;
constexpr std::time_t kFresh = 60;  // seconds, in which a use is not noted again

std::uint64_t units_of(std::uint64_t size) {
  return (size + kUnit - 1) / kUnit;
}

std::uint64_t trailer_bytes(std::uint64_t units) {
  return (units + 1) * sizeof(std::uint64_t);
}

// The size of the block in a file of this size, if a block's file can have that; else 0.
std::uint64_t size_in(std::uint64_t file_size) {
  for (std::uint64_t units = 1; units <= kMostUnits; ++units) {
    const std::uint64_t size = file_size - std::min(file_size, trailer_bytes(units));
    if (units_of(size) == units) return size;
  }
  return 0;
}

std::uint64_t seal_of(const BlockName& name, std::uint64_t size,
                      std::span<const std::uint64_t> digests) {
  std::string text = "block of tessera, version 1";
  text += '\0' + name.key + '\0' + name.block + '\0' + std::to_string(size);
  RunningDigest seal;
  seal.add(std::as_bytes(std::span(text)));
  seal.add(std::as_bytes(digests));
  return seal.value();
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

}  // namespace

std::vector<std::uint64_t> block_trailer(const BlockName& name, ByteView bytes) {
  std::vector<std::uint64_t> trailer;
  for (std::size_t at = 0; at < bytes.size(); at += kUnit)
    trailer.push_back(digest64(bytes.subspan(at, std::min<std::size_t>(kUnit, bytes.size() - at))));
  trailer.push_back(seal_of(name, bytes.size(), trailer));
  return trailer;
}

// O_NONBLOCK: a FIFO would otherwise wait for a writer.
BlockFile::BlockFile(const std::string& path, const BlockName& name, const CacheDirectory& owner)
    : fd_(opened(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK)) {
  struct stat status {};
  is_others_ =
      fd_ ? ::fstat(fd_.get(), &status) != 0 || !owner.owns_file(fd_.get()) : errno != ENOENT;
  if (!fd_ || is_others_) return;
  used_ = status.st_mtime;
  file_size_ = static_cast<std::uint64_t>(status.st_size);
  size_ = size_in(file_size_);
  is_sealed_ = size_ != 0 && read_trailer(name);
}

bool BlockFile::read_trailer(const BlockName& name) {
  trailer_.resize(units_of(size_) + 1);
  if (!read_whole(fd_, size_, std::as_writable_bytes(std::span(trailer_)))) return false;
  const auto digests = std::span<const std::uint64_t>(trailer_).first(trailer_.size() - 1);
  return trailer_.back() == seal_of(name, size_, digests);
}

void BlockFile::note_use() const {
  if (std::time(nullptr) - used_ > kFresh) (void)::futimens(fd_.get(), nullptr);
}

bool BlockFile::read(std::uint64_t within, MutableByteView out) const {
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

namespace {

constexpr std::size_t kMostAround = 16;  // blocks that are in memory because parts are wanted

class BlockCachedSource final : public ForwardingSource {
 public:
  BlockCachedSource(std::shared_ptr<ByteSource> source, std::shared_ptr<BlockCache> cache)
      : ForwardingSource(std::move(source)),
        cache_(std::move(cache)),
        key_(BlockCache::key_of(inner())) {}

  void read_at(std::uint64_t offset, MutableByteView out) const override {
    const ReadRange range{offset, out};
    read_ranges({&range, 1});
  }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    Missing missing;
    for (ReadRange range : ranges) {
      require_range(*this, range.offset, range.out.size());
      while (!range.out.empty()) {
        const auto place = place_at(range.offset);
        const std::uint64_t within = range.offset % BlockCache::kBlock;
        const auto part =
            range.out.first(std::min<std::uint64_t>(range.out.size(), place.size - within));
        if (!cache_->read(place, within, part)) add(missing, place, within, part);
        range.offset += part.size();
        range.out = range.out.subspan(part.size());
      }
    }
    fetch(missing);
  }

 private:
  struct Part {
    std::uint64_t block, within;
    MutableByteView out;
  };
  struct Missing {
    std::map<std::uint64_t, MutableByteView> whole;  // wanted whole, where they go
    std::map<std::uint64_t, std::vector<std::byte>> around;
    std::vector<Part> parts;  // of the blocks in `around`
  };

  [[nodiscard]] BlockCache::Place place_at(std::uint64_t offset) const {
    const std::uint64_t block = offset / BlockCache::kBlock;
    return {key_, block, std::min(BlockCache::kBlock, size() - block * BlockCache::kBlock)};
  }

  void add(Missing& missing, const BlockCache::Place& place, std::uint64_t within,
           MutableByteView part) const {
    if (part.size() == place.size && missing.whole.emplace(place.block, part).second) return;
    missing.around.try_emplace(place.block);
    missing.parts.push_back({place.block, within, part});
    if (missing.around.size() >= kMostAround) fetch(missing);
  }

  void fetch(Missing& missing) const {
    std::vector<ReadRange> wanted;
    std::map<std::uint64_t, ByteView> blocks;
    for (const auto& [block, out] : missing.whole) blocks.emplace(block, out);
    for (const auto& [block, out] : missing.whole)
      wanted.push_back({block * BlockCache::kBlock, out});
    for (auto& [block, bytes] : missing.around) {
      const std::uint64_t begin = block * BlockCache::kBlock;
      bytes.resize(place_at(begin).size);
      wanted.push_back({begin, bytes});
      blocks.emplace(block, bytes);
    }
    if (wanted.empty()) return;
    std::ranges::sort(wanted, {}, &ReadRange::offset);
    inner().read_ranges(wanted);
    for (const auto& [block, bytes] : blocks)
      cache_->keep(place_at(block * BlockCache::kBlock), bytes);
    for (const Part& part : missing.parts)
      std::memcpy(part.out.data(), missing.around.at(part.block).data() + part.within,
                  part.out.size());
    missing = {};
  }

  const std::shared_ptr<BlockCache> cache_;
  const std::string key_;
};

class BlockCachedStore final : public ForwardingStore {
 public:
  BlockCachedStore(std::shared_ptr<Store> store, std::shared_ptr<BlockCache> cache)
      : ForwardingStore(std::move(store)), cache_(std::move(cache)) {}

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return cached(ForwardingStore::open(name));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open_listed(const ObjectInfo& object) const override {
    return cached(inner().open_listed(object));
  }

 private:
  [[nodiscard]] std::shared_ptr<ByteSource> cached(std::shared_ptr<ByteSource> source) const {
    if (source->identity().empty()) return source;
    return std::make_shared<BlockCachedSource>(std::move(source), cache_);
  }

  const std::shared_ptr<BlockCache> cache_;
};

struct Used {
  ShortMutex mutex;
  std::shared_ptr<BlockCache> cache;  // guarded by mutex; null: none
};

constinit Used used;

}  // namespace

std::shared_ptr<Store> block_cached_store(std::shared_ptr<Store> store,
                                          std::shared_ptr<BlockCache> cache) {
  return std::make_shared<BlockCachedStore>(std::move(store), std::move(cache));
}

std::shared_ptr<Store> with_local_cache(std::shared_ptr<Store> store) {
  const std::lock_guard lock(used.mutex);
  return used.cache ? block_cached_store(std::move(store), used.cache) : store;
}

void use_local_cache(std::optional<LocalCache> cache) {
  std::shared_ptr<BlockCache> made;
  if (cache) {
    if (cache->directory.empty())
      throw Error(ErrorCode::invalid_argument, "a local cache needs a directory");
    require_local(cache->directory);
    made = std::make_shared<BlockCache>(cache->directory, cache->most_bytes);
  }
  const std::lock_guard lock(used.mutex);
  used.cache = std::move(made);
}

}  // namespace tessera
