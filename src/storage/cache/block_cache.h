// Blocks of objects in a directory of their own (cache_directory.h):
//
//     KEY/BLOCK     4 MiB of the object, less at its end, and what proves them (block_file.h)
//     .ATTEMPT.tmp  a block that is being written
//     .lock         held by who removes blocks
//
// KEY is a digest of what the object calls its identity, so another version has other blocks.
// Blocks get their name when they are whole, and are compared with their digests at each read. What
// has a block's name, and is another user's or lacks the block's seal, is not used and not removed.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <string>

#include "storage/cache/cache_directory.h"
#include "tessera/io.h"

namespace tessera {

class BlockCache {
 public:
  static constexpr std::uint64_t kBlock = 4U << 20U;

  // Below `directory`. Throws what CacheDirectory::is_there() does.
  BlockCache(const std::string& directory, std::uint64_t most_bytes);

  // What the blocks of an object are called after: nobody can read addresses back from it. The
  // object has an identity.
  [[nodiscard]] static std::string key_of(const ByteSource& object);

  // Of one block of an object.
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

}  // namespace tessera
