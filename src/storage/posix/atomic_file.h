// Files that appear whole or not at all.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "tessera/storage.h"

namespace tessera {

class AtomicFile final : public ByteSink {
 public:
  AtomicFile(std::string path, IfExists if_exists, std::uint64_t size_hint);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() override;

  void write_at(std::uint64_t offset, ByteView bytes) override;
  void commit() override;
  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  struct Run {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  void require_open() const;
  void reserve(std::uint64_t size);
  // Counts bytes [begin, end) as written, and starts their write-back when enough lie together.
  void note_written(std::uint64_t begin, std::uint64_t end);

  const std::string path_;  // the name it gets
  const IfExists if_exists_;
  std::string directory_;  // path_'s
  std::string temporary_;  // the name it has until commit; empty: nothing to remove
  Fd fd_;                  // none after commit
  std::mutex mutex_;       // guards everything below
  std::uint64_t end_ = 0;  // one past the last byte written
  // Written one after another, each run by one thread as a rule, and not yet on its way to the
  // device. Oldest first.
  std::vector<Run> pending_;
};

// Whether this is what AtomicFile calls a file until its commit: ".NAME.tmp-" and 12 hex digits.
[[nodiscard]] bool is_temporary_name(std::string_view file_name);

// Gives the file `temporary` the name `path`, which must be free, on file systems whose rename
// cannot refuse a name that is taken.
void link_into_place(const std::string& temporary, const std::string& path);

}  // namespace tessera
