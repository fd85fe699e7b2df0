// The directory that a cache has for itself:
//
//     GIVEN/tessera-blocks-UID/CACHEDIR.TAG   says whose it is, also to programs for backups
//     GIVEN/tessera-blocks-UID/...            see block_cache.h
//
// Whatever else is in GIVEN is never looked into (SECURITY.md). Each user has one of its own, so
// that users may share GIVEN, and none takes what another one has put there.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <ctime>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "base/process.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

class CacheDirectory {
 public:
  explicit CacheDirectory(const std::string& given);

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  // Whether it is there. Throws `unsafe` for what may have things of others in it: no directory of
  // ours alone, or one without the marker; and `unsupported` for one of another version.
  [[nodiscard]] bool is_there() const;
  // Makes it, unless it is there.
  void make() const;
  // Whether a directory, or an open file, belongs to whom the cache belongs to, and nobody else may
  // write into it. Only after is_there() or make().
  [[nodiscard]] bool owns_directory(const std::string& path) const;
  [[nodiscard]] bool owns_file(int fd) const;

 private:
  [[nodiscard]] bool owns(uid_t owner, mode_t mode) const;
  void require_marker() const;

  const std::string path_;
  mutable std::atomic<std::int64_t> owner_{-1};  // of what we make; -1: not known yet
  mutable std::atomic<bool> is_marked_{false};   // the marker was seen
};

// One block of an object in a file: its bytes, the digest of each MiB of them, and a seal, which
// tells this block of this object from everything else that could have the file's name.

// The names of its directory and file, which tell the object and the block of it.
struct BlockName {
  std::string key, block;
};

// What stands behind the bytes.
[[nodiscard]] std::vector<std::uint64_t> block_trailer(const BlockName& name, ByteView bytes);

class BlockFile {
 public:
  // `owner`: whose files count; a link is none of them.
  BlockFile(const std::string& path, const BlockName& name, const CacheDirectory& owner);

  // Whether there is something that is not the owner's: it has to stay.
  [[nodiscard]] bool is_others() const noexcept { return is_others_; }
  // Whether it has the seal of this block. Its bytes may be damaged still.
  [[nodiscard]] bool is_sealed() const noexcept { return is_sealed_; }
  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }  // of the bytes alone
  [[nodiscard]] std::uint64_t file_size() const noexcept { return file_size_; }
  [[nodiscard]] std::time_t used() const noexcept { return used_; }

  void note_use() const;
  // Fills `out`, which ends within the block, from its byte `within` on. False: it is damaged.
  [[nodiscard]] bool read(std::uint64_t within, MutableByteView out) const;

 private:
  [[nodiscard]] bool read_trailer(const BlockName& name);

  Fd fd_;
  bool is_others_ = false, is_sealed_ = false;
  std::uint64_t size_ = 0, file_size_ = 0;
  std::time_t used_ = 0;
  std::vector<std::uint64_t> trailer_;
};

// Blocks of objects in a directory of their own:
//
//     KEY/BLOCK     4 MiB of the object, less at its end, and what proves them
//     .ATTEMPT.tmp  a block that is being written
//     .lock         held by who removes blocks
//
// KEY is a digest of what the object calls its identity, so another version has other blocks.
// Blocks get their name when they are whole, and are compared with their digests at each read. What
// has a block's name, and is another user's or lacks the block's seal, is not used and not removed.

class BlockCache {
 public:
  static constexpr std::uint64_t kBlock = 4U << 20U;

  // Below `directory`. Throws what CacheDirectory::is_there() does.
  BlockCache(const std::string& directory, std::uint64_t most_bytes);

  // What the blocks of an object are called after: nobody can read addresses back from it. The
  // object has an identity.
  [[nodiscard]] static std::string key_of(const ByteSource& object);

  // The place of one block of an object.
  struct Place {
    const std::string& key;
    std::uint64_t block = 0;
    std::uint64_t size = 0;  // bytes of the block
  };
  // Fills `out` from byte `within` of the block on. False: it is not there, or damaged, and then
  // removed.
  [[nodiscard]] bool read(const Place& place, std::uint64_t within, MutableByteView out) noexcept;
  // Keeps the whole block. A failure is told once, and then nothing is kept any more.
  void keep(const Place& place, ByteView bytes) noexcept;

 private:
  [[nodiscard]] std::string directory_of_key(const std::string& key) const;
  [[nodiscard]] bool read_block(const Place& place, std::uint64_t within,
                                MutableByteView out) const;
  void write(const Place& place, ByteView bytes);
  void make_room();
  void give_up(const std::exception& error) noexcept;

  const CacheDirectory directory_;
  const std::uint64_t most_bytes_;
  std::atomic<bool> is_given_up_{false};
  std::atomic<bool> is_counted_{false};
  std::atomic<std::uint64_t> bytes_{0};  // of all blocks, as far as this process knows
};

// A store whose objects are read through a cache of blocks, which fills itself: by versions, for
// any objects. cached_store() of tessera/copy.h reads copies of files that somebody else
// made.

// Objects without an identity are not kept. Writes go to the store.
[[nodiscard]] std::shared_ptr<Store> block_cached_store(std::shared_ptr<Store> store,
                                                        std::shared_ptr<BlockCache> cache);
// The same with what use_local_cache() has said; `store` itself if that is nothing.
[[nodiscard]] std::shared_ptr<Store> with_local_cache(std::shared_ptr<Store> store);

}  // namespace tessera
