// Bytes on their way into an open file.
#pragma once

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/process.h"
#include "tessera/io.h"
#include "tessera/storage.h"

namespace tessera {

class FileWriter {
 public:
  // `path`: what errors call the file.
  FileWriter(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  // Asks for room. Throws `out_of_space`; a file system that cannot reserve will say later.
  void reserve(std::uint64_t size);
  // From several threads for ranges that do not overlap. Starts write-back early.
  void write_at(std::uint64_t offset, ByteView bytes);
  // Cuts the file behind the last byte that was written, makes it durable and gives it back: once.
  // After a failure the bytes may be lost, whatever a second fsync says.
  Fd finish();
  // Makes it durable and closes it; nothing is cut, since others write into it: once.
  void sync();
  [[nodiscard]] bool is_open() const { return static_cast<bool>(fd_); }

 private:
  struct Run {
    std::uint64_t begin = 0;
    std::uint64_t end = 0;
  };

  // Counts bytes [begin, end) as written, and starts their write-back when enough lie together.
  void note_written(std::uint64_t begin, std::uint64_t end);
  // Counts them; returns what is to be written back now, if anything.
  Run next_to_write_back(std::uint64_t begin, std::uint64_t end);

  Fd fd_;  // none after finish
  const std::string path_;
  std::mutex mutex_;       // guards everything below
  std::uint64_t end_ = 0;  // one past the last byte written
  // Written one after another, each run by one thread as a rule, and not yet on its way to the
  // device. Oldest first.
  std::vector<Run> pending_;
};

// Files that appear whole or not at all.

// What a file is called until its commit.
enum class UntilCommit : std::uint8_t {
  unnamed_if_possible,  // nothing: it ends with the process (O_TMPFILE)
  temporary_name,       // ".NAME.tmp-" and 12 hex digits; the writer has its lock
};

class AtomicFile final : public ByteSink {
 public:
  // `until_commit`: for file systems that have no files without names, and for tests.
  AtomicFile(std::string path, IfExists if_exists, std::uint64_t size_hint,
             UntilCommit until_commit = UntilCommit::unnamed_if_possible);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() override;

  void write_at(std::uint64_t offset, ByteView bytes) override;
  void commit() override;
  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  FileWriter& open_file();
  void open_named();
  void reserve(std::uint64_t size);
  void link(int fd);

  const std::string path_;  // the name it gets
  const IfExists if_exists_;
  MadeHere made_here_;
  std::string temporary_;  // the name it has until commit; empty: none, nothing to remove
  std::optional<FileWriter> file_;
};

// Removes what killed writers of the file `path` left under temporary names. To be called before
// work on the file begins; it looks through its directory.
void remove_abandoned_temporaries(const std::string& path);

// Whether this is what AtomicFile calls a file until its commit: ".NAME.tmp-" and 12 hex digits.
[[nodiscard]] bool is_temporary_name(std::string_view file_name);

// Gives the durable file `temporary` the name `path` in one step, and makes the name durable. With
// IfExists::fail a name that is taken is `already_exists`, with IfExists::replace what has it goes,
// and leaves its mode, owner and group to the new file.
void move_into_place(const std::string& temporary, const std::string& path, IfExists if_exists);

// Gives the file `temporary` the name `path`, which must be free, on file systems whose rename
// cannot refuse a name that is taken.
void link_into_place(const std::string& temporary, const std::string& path);

}  // namespace tessera
