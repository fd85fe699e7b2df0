// A directory of blocks of objects:
//
//     DIRECTORY/KEY/BLOCK     4 MiB of the object, less at its end; the digests of each MiB of
//                             them; a number that says that this is all
//     DIRECTORY/.ATTEMPT.tmp  a block that is being written
//     DIRECTORY/.lock         held by who removes blocks
//
// KEY is a digest of the object's name, version and size, so another version has other blocks.
// Blocks get their name when they are whole, and are compared with their digests at each read.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "tessera/io.h"

namespace tessera {

class BlockCache {
 public:
  static constexpr std::uint64_t kBlock = 4U << 20U;

  BlockCache(std::string directory, std::uint64_t most_bytes);

  // What the blocks of an object are called after.
  [[nodiscard]] static std::string key_of(const ByteSource& object);

  // Of one block of an object.
  struct Place {
    const std::string& key;
    std::uint64_t block = 0;
    std::uint64_t size = 0;  // bytes of the block
  };
  // Fills `out` from byte `within` of the block on. False: it is not there, or damaged, and then
  // removed.
  [[nodiscard]] bool read(const Place& place, std::uint64_t within, MutableByteView out) const;
  // Keeps the whole block. A failure is told once, and then nothing is kept any more.
  void keep(const Place& place, ByteView bytes) noexcept;

 private:
  [[nodiscard]] std::string path_of(const Place& place) const;
  void write(const Place& place, ByteView bytes);
  void make_room();

  const std::string directory_;
  const std::uint64_t most_bytes_;
  std::atomic<bool> is_given_up_{false};
  std::atomic<bool> is_counted_{false};
  std::atomic<std::uint64_t> bytes_{0};  // of all blocks, as far as this process knows
};

}  // namespace tessera
