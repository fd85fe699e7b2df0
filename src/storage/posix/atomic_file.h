// Files that appear whole or not at all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "base/fork.h"
#include "storage/posix/file_writer.h"
#include "tessera/storage.h"

namespace tessera {

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
