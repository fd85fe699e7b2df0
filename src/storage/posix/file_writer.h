// Bytes on their way into an open file.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/fd.h"
#include "tessera/io.h"

namespace tessera {

class FileWriter {
 public:
  // `path`: what errors call the file.
  FileWriter(Fd fd, std::string path) : fd_(std::move(fd)), path_(std::move(path)) {}

  // Asks for room. Throws `out_of_space`; a file system that cannot reserve will say later.
  void reserve(std::uint64_t size);
  // From several threads for ranges that do not overlap. Starts write-back early.
  void write_at(std::uint64_t offset, ByteView bytes);
  // The file has its bytes up to `end` already.
  void keep(std::uint64_t end);
  // Cuts the file behind the last byte that was written or kept, makes it durable and gives it
  // back: once. After a failure the bytes may be lost, whatever a second fsync says.
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
  std::uint64_t end_ = 0;  // one past the last byte written or kept
  // Written one after another, each run by one thread as a rule, and not yet on its way to the
  // device. Oldest first.
  std::vector<Run> pending_;
};

}  // namespace tessera
