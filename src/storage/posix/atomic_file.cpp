// The one way a file of ours comes into being:
//   1. make the missing directories, each synced into its parent;
//   2. open a temporary name in the file's own directory, exclusively;
//   3. write; write-back starts early, so that step 4 is short;
//   4. fsync the file, once: after a failed fsync the kernel may have dropped the pages and a
//   second one
//      would succeed without them, so a failure ends the attempt;
//   5. rename it to its name: RENAME_NOREPLACE when the name must be free, plain rename when what
//   has
//      it is replaced;
//   6. fsync the directory.
// A crash before 5 leaves the old file, if any, and a temporary that no reader looks at; after 5
// the new file is whole. When 6 fails the file is there but may not survive a crash: commit throws.
#include "storage/posix/atomic_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/random_id.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr std::size_t kAttemptDigits = 12;  // of random_attempt()
constexpr std::size_t kLongestName = 255;   // what Linux file systems take

std::string temporary_name(const std::string& file_name) {
  const std::size_t room = kLongestName - 1 - kTemporaryMark.size() - kAttemptDigits;
  return "." + file_name.substr(0, room) + std::string(kTemporaryMark) + random_attempt();
}

}  // namespace

bool is_temporary_name(std::string_view file_name) {
  const std::size_t tail = kTemporaryMark.size() + kAttemptDigits;
  if (!file_name.starts_with('.') || file_name.size() <= 1 + tail) return false;
  const std::string_view end = file_name.substr(file_name.size() - tail);
  return end.starts_with(kTemporaryMark) &&
         end.find_first_not_of("0123456789abcdef", kTemporaryMark.size()) == std::string_view::npos;
}

void link_into_place(const std::string& temporary, const std::string& path) {
  if (::link(temporary.c_str(), path.c_str()) != 0) throw_errno(errno, "link into place", path);
  ::unlink(temporary.c_str());
}

void move_into_place(const std::string& temporary, const std::string& path, IfExists if_exists) {
  const unsigned flags = if_exists == IfExists::fail ? RENAME_NOREPLACE : 0U;
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), flags) != 0) {
    const bool no_such_flag = flags != 0 && (errno == EINVAL || errno == ENOSYS);
    if (!no_such_flag) throw_errno(errno, "rename into place", path);
    link_into_place(temporary, path);
  }
  const std::string directory = std::filesystem::path(path).parent_path().string();
  sync_directory(directory.empty() ? "." : directory);
}

AtomicFile::AtomicFile(std::string path, IfExists if_exists, std::uint64_t size_hint)
    : path_(std::move(path)), if_exists_(if_exists) {
  const std::filesystem::path as_path(path_);
  std::string directory = as_path.parent_path().string();
  if (directory.empty()) directory = ".";
  make_directories(directory);
  if (::access(path_.c_str(), F_OK) == 0) {
    if (if_exists == IfExists::fail) throw_errno(EEXIST, "create", path_);
  } else if (errno != ENOENT) {
    throw_errno(errno, "create", path_);
  }
  const std::string temporary = directory + "/" + temporary_name(as_path.filename().string());
  Fd fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) throw_errno(errno, "create", path_);
  temporary_ = temporary;
  file_.emplace(std::move(fd), path_);
  try {
    file_->reserve(size_hint);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write_at(std::uint64_t offset, ByteView bytes) {
  open_file().write_at(offset, bytes);
}

void AtomicFile::commit() {
  open_file().finish();
  move_into_place(temporary_, path_, if_exists_);
  temporary_.clear();
}

FileWriter& AtomicFile::open_file() {
  if (!file_->is_open()) {
    throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
  }
  return *file_;
}

}  // namespace tessera
