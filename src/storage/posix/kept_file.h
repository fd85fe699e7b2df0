// A file that an interrupted writer leaves behind for the next one.
#pragma once

#include <cstdint>
#include <string>

#include "storage/posix/file_writer.h"
#include "tessera/storage.h"

namespace tessera {

// A file that has its name from the beginning, in a directory that nobody reads (WorkDirectory).
// What is in it stays when the writer ends without commit, and is there for `keep_at` when it is
// opened again: after its bytes were read back and found right, never because they are there.
class KeptFile final : public ByteSink {
 public:
  // Opens the file, or makes it; a file with other names, too, is given up for a new one.
  KeptFile(std::string path, std::uint64_t size_hint);

  void write_at(std::uint64_t offset, ByteView bytes) override;
  void keep_at(std::uint64_t offset, ByteView bytes) override;
  // Makes the bytes durable; moving the file to its place is the caller's. A failure removes it:
  // what the system could not bring to the device must not be taken for written by a later run.
  void commit() override;
  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  const std::string path_;
  FileWriter file_;
};

}  // namespace tessera
