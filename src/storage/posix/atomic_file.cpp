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

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/checked.h"
#include "base/random_id.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr std::size_t kAttemptDigits = 12;          // of random_attempt()
constexpr std::size_t kLongestName = 255;           // what Linux file systems take
constexpr std::uint64_t kWriteBackStep = 8 << 20;   // bytes that start write-back
constexpr std::uint64_t kWriteBackLeast = 1 << 20;  // less than this is not worth a call
constexpr std::size_t kWriters = 16;                // whose runs are followed at once

std::string temporary_name(const std::string& file_name) {
  const std::size_t room = kLongestName - 1 - kTemporaryMark.size() - kAttemptDigits;
  return "." + file_name.substr(0, room) + std::string(kTemporaryMark) + random_attempt();
}

// Only starts the write: waiting here would take the write's error away from fsync.
void start_write_back(int fd, std::uint64_t begin, std::uint64_t end) {
  ::sync_file_range(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                    SYNC_FILE_RANGE_WRITE);
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

AtomicFile::AtomicFile(std::string path, IfExists if_exists, std::uint64_t size_hint)
    : path_(std::move(path)), if_exists_(if_exists) {
  const std::filesystem::path as_path(path_);
  directory_ = as_path.parent_path().string();
  if (directory_.empty()) directory_ = ".";
  make_directories(directory_);
  if (::access(path_.c_str(), F_OK) == 0) {
    if (if_exists == IfExists::fail) throw_errno(EEXIST, "create", path_);
  } else if (errno != ENOENT) {
    throw_errno(errno, "create", path_);
  }
  const std::string temporary = directory_ + "/" + temporary_name(as_path.filename().string());
  fd_ = Fd(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd_) throw_errno(errno, "create", path_);
  temporary_ = temporary;
  try {
    reserve(size_hint);
  } catch (...) {
    ::unlink(temporary_.c_str());
    throw;
  }
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

// A file system that cannot reserve will say when it is full.
void AtomicFile::reserve(std::uint64_t size) {
  if (size == 0 || !std::in_range<off_t>(size)) return;
  if (::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size)) == 0) return;
  if (errno == ENOSPC || errno == EDQUOT) {
    throw_errno(errno, "reserve " + std::to_string(size) + " bytes", path_);
  }
}

void AtomicFile::write_at(std::uint64_t offset, ByteView bytes) {
  require_open();
  (void)narrow<off_t>(checked_add<std::uint64_t>(offset, bytes.size()));
  while (!bytes.empty()) {
    const auto part = bytes.first(std::min<std::size_t>(bytes.size(), kWriteBackStep));
    const ssize_t wrote = ::pwrite(fd_.get(), part.data(), part.size(), static_cast<off_t>(offset));
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) throw_errno(errno, "write", path_);
    if (wrote == 0) {
      throw Error(ErrorCode::io, "a write made no progress").at_path(path_).at_offset(offset);
    }
    const auto count = static_cast<std::uint64_t>(wrote);
    note_written(offset, offset + count);
    bytes = bytes.subspan(count);
    offset += count;
  }
}

void AtomicFile::note_written(std::uint64_t begin, std::uint64_t end) {
  Run start;
  {
    const std::lock_guard lock(mutex_);
    end_ = std::max(end_, end);
    auto run = std::find_if(pending_.begin(), pending_.end(),
                            [begin](const Run& candidate) { return candidate.end == begin; });
    if (run == pending_.end()) {
      if (pending_.size() == kWriters) {
        start = pending_.front();
        pending_.erase(pending_.begin());
      }
      run = pending_.insert(pending_.end(), {begin, begin});
    }
    run->end = end;
    if (run->end - run->begin >= kWriteBackStep) {
      start = *run;
      run->begin = run->end;  // where this writer goes on
    }
  }
  if (start.end - start.begin >= kWriteBackLeast)
    start_write_back(fd_.get(), start.begin, start.end);
}

void AtomicFile::commit() {
  require_open();
  // The reservation may reach past what was written.
  if (::ftruncate(fd_.get(), static_cast<off_t>(end_)) != 0) throw_errno(errno, "truncate", path_);
  if (::fsync(fd_.get()) != 0) throw_errno(errno, "fsync", path_);
  fd_ = Fd();
  const unsigned flags = if_exists_ == IfExists::fail ? RENAME_NOREPLACE : 0U;
  if (::renameat2(AT_FDCWD, temporary_.c_str(), AT_FDCWD, path_.c_str(), flags) != 0) {
    const bool no_such_flag = flags != 0 && (errno == EINVAL || errno == ENOSYS);
    if (!no_such_flag) throw_errno(errno, "rename into place", path_);
    link_into_place(temporary_, path_);
  }
  temporary_.clear();
  sync_directory(directory_);
}

void AtomicFile::require_open() const {
  if (!fd_) throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
}

}  // namespace tessera
