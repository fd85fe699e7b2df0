// One block of an object in a file: its bytes, the digest of each MiB of them, and a seal, which
// tells this block of this object from everything else that could have the file's name.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <vector>

#include "base/fd.h"
#include "storage/cache/cache_directory.h"
#include "tessera/io.h"

namespace tessera {

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

}  // namespace tessera
