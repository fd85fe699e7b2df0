#include "storage/posix/atomic_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "base/numbers.h"
#include "base/process.h"
#include "storage/posix/lock.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kWriteBackStep = 8 << 20;   // bytes that start write-back
constexpr std::uint64_t kWriteBackLeast = 1 << 20;  // less than this is not worth a call
constexpr std::size_t kWriters = 16;                // whose runs are followed at once
constexpr int kIdleWrites = 3;                      // one after another are an error

// Only starts the write: waiting here would take the write's error away from fsync.
void start_write_back(int fd, std::uint64_t begin, std::uint64_t end) {
  ::sync_file_range(fd, static_cast<off_t>(begin), static_cast<off_t>(end - begin),
                    SYNC_FILE_RANGE_WRITE);
}

// Some file systems tell only at a close that a write has failed. The file is needed after this, so
// it is a second descriptor that is closed; the system closes it also when a signal interrupts.
void require_closing(int fd, const std::string& path) {
  const int second = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (second < 0) throw_errno(errno, "close", path);
  if (::close(second) != 0 && errno != EINTR) throw_errno(errno, "close", path);
}

}  // namespace

void FileWriter::reserve(std::uint64_t size) {
  if (size == 0 || !std::in_range<off_t>(size)) return;
  const auto allocate = [&] {
    return ::fallocate(fd_.get(), FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(size));
  };
  if (uninterrupted(allocate) == 0) return;
  if (error_code_of(errno) == ErrorCode::out_of_space) {
    throw_errno(errno, "reserve " + std::to_string(size) + " bytes", path_);
  }
}

void FileWriter::write_at(std::uint64_t offset, ByteView bytes) {
  (void)narrow<off_t>(checked_add<std::uint64_t>(offset, bytes.size()));
  for (int idle = 0; !bytes.empty();) {
    const auto part = bytes.first(std::min<std::size_t>(bytes.size(), kWriteBackStep));
    const ssize_t wrote = transferred(
        [&] { return ::pwrite(fd_.get(), part.data(), part.size(), static_cast<off_t>(offset)); });
    if (wrote < 0) throw_errno(errno, "write", path_);
    idle = wrote == 0 ? idle + 1 : 0;
    if (idle == kIdleWrites) {
      throw Error(ErrorCode::io, "writes made no progress").at_path(path_).at_offset(offset);
    }
    const auto count = static_cast<std::uint64_t>(wrote);
    if (count > 0) note_written(offset, offset + count);
    bytes = bytes.subspan(count);
    offset += count;
  }
}

FileWriter::Run FileWriter::next_to_write_back(std::uint64_t begin, std::uint64_t end) {
  Run start;
  const std::lock_guard lock(mutex_);
  end_ = std::max(end_, end);
  auto run = std::ranges::find(pending_, begin, &Run::end);
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
  return start;
}

void FileWriter::note_written(std::uint64_t begin, std::uint64_t end) {
  const Run start = next_to_write_back(begin, end);
  if (start.end - start.begin >= kWriteBackLeast)
    start_write_back(fd_.get(), start.begin, start.end);
}

Fd FileWriter::finish() {
  // The reservation may reach past what was written.
  const auto cut = [this] { return ::ftruncate(fd_.get(), static_cast<off_t>(end_)); };
  if (uninterrupted(cut) != 0) throw_errno(errno, "truncate", path_);
  sync_open(fd_.get(), path_);
  require_closing(fd_.get(), path_);
  return std::exchange(fd_, Fd());
}

void FileWriter::sync() {
  sync_open(fd_.get(), path_);
  require_closing(fd_.get(), path_);
  fd_ = Fd();
}

// The one way a file of ours comes into being:
//   1. make the missing directories, each synced into its parent;
//   2. open a file without a name in the directory (O_TMPFILE), or exclusively under a temporary
//   name where the file system has no such files;
//   3. write; write-back starts early, so that step 4 is short;
//   4. fsync the file, once: after a failed fsync the kernel may have dropped the pages and a
//   second one would succeed without them, so a failure ends the attempt;
//      What it replaces gives it its mode, from the beginning: who may not read the old file shall
//      not read the new one;
//   5. give it its name: linkat, or a rename with RENAME_NOREPLACE, when the name must be free; a
//   plain rename when what has it is replaced;
//   6. fsync the directory.
// A crash before 5 leaves the old file, if any, and at most a temporary that no reader looks at;
// after 5 the new file is whole. When 6 fails the file is there but may not survive a crash: commit
// throws.

namespace {

constexpr std::string_view kTemporaryMark = ".tmp-";
constexpr std::size_t kLongestName = 255;  // what Linux file systems take

std::string temporary_name(const std::string& file_name) {
  const std::size_t room = kLongestName - 1 - kTemporaryMark.size() - kAttemptDigits;
  return "." + file_name.substr(0, room) + std::string(kTemporaryMark) + random_attempt();
}

// A free name beside the file.
std::string temporary_path(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  return directory_of(path) + "/" + temporary_name(name);
}

void require_room(const std::string& path, IfExists if_exists) {
  if (::access(path.c_str(), F_OK) == 0) {
    if (if_exists == IfExists::fail) throw_errno(EEXIST, "create", path);
  } else if (errno != ENOENT) {
    throw_errno(errno, "create", path);
  }
}

// How the kernel finds an open file that has no name.
std::string link_of(int fd) {
  return "/proc/self/fd/" + std::to_string(fd);
}

// None where the file system has no such files, or where nobody could name them afterwards.
Fd open_unnamed(const std::string& directory) {
  Fd fd = opened(directory, O_TMPFILE | O_WRONLY);
  if (!fd || ::access(link_of(fd.get()).c_str(), F_OK) != 0) return {};
  return fd;
}

}  // namespace

void remove_abandoned_temporaries(const std::string& path) {
  const std::string name = temporary_name(std::filesystem::path(path).filename().string());
  const std::string start = name.substr(0, name.size() - kAttemptDigits);
  remove_abandoned_attempts(directory_of(path), start, std::filesystem::file_type::regular);
}

bool is_temporary_name(std::string_view file_name) {
  const std::size_t tail = kTemporaryMark.size() + kAttemptDigits;
  if (!file_name.starts_with('.') || file_name.size() <= 1 + tail) return false;
  const std::string_view end = file_name.substr(file_name.size() - tail);
  return end.starts_with(kTemporaryMark) && is_attempt(end.substr(kTemporaryMark.size()));
}

void link_into_place(const std::string& temporary, const std::string& path) {
  const auto file = id_of(temporary);
  if (::link(temporary.c_str(), path.c_str()) != 0 && !is_at(file, path))
    throw_errno(errno, "link into place", path);
  ::unlink(temporary.c_str());
}

void move_into_place(const std::string& temporary, const std::string& path, IfExists if_exists) {
  const unsigned flags = if_exists == IfExists::fail ? RENAME_NOREPLACE : 0U;
  if (if_exists == IfExists::replace) take_access_of(path, temporary);
  const auto file = id_of(temporary);
  if (::renameat2(AT_FDCWD, temporary.c_str(), AT_FDCWD, path.c_str(), flags) != 0) {
    const int error = errno;
    const bool no_such_flag = flags != 0 && lacks_flag(error);
    const bool is_done = error == ENOENT && is_at(file, path);
    if (!no_such_flag && !is_done) throw_errno(error, "rename into place", path);
    if (no_such_flag) link_into_place(temporary, path);
  }
  sync_directory(directory_of(path));
}

AtomicFile::AtomicFile(std::string path, IfExists if_exists, std::uint64_t size_hint,
                       UntilCommit until_commit)
    : path_(std::move(path)), if_exists_(if_exists) {
  const std::string directory = directory_of(path_);
  make_directories(directory);
  require_room(path_, if_exists);
  if (until_commit == UntilCommit::unnamed_if_possible) {
    if (Fd fd = open_unnamed(directory)) {
      if (if_exists_ == IfExists::replace) take_access_of(path_, link_of(fd.get()));
      file_.emplace(std::move(fd), path_);
    }
  }
  if (!file_) open_named();
  reserve(size_hint);
}

// Part of the constructor: a destructor will not follow its failure.
void AtomicFile::reserve(std::uint64_t size) {
  try {
    file_->reserve(size);
  } catch (...) {
    if (!temporary_.empty()) ::unlink(temporary_.c_str());
    throw;
  }
}

// Another process that looks for what killed ones left has a file's lock, or has removed it, when
// it comes before ours. Needs no memory once there is a file: without it nobody would remove that.
void AtomicFile::open_named() {
  constexpr int kTries = 100;
  std::string path = path_;
  for (int i = 0; i < kTries; ++i) {
    std::string temporary = temporary_path(path_);
    Fd fd = opened(temporary, O_WRONLY | O_CREAT | O_EXCL);
    if (!fd) throw_errno(errno, "create", path_);
    temporary_ = std::move(temporary);
    if (try_lock(fd.get()) != Locked::no && is_at(id_of(fd.get()), temporary_)) {
      if (if_exists_ == IfExists::replace) take_access_of(path_, temporary_);
      file_.emplace(std::move(fd), std::move(path));
      return;
    }
    ::unlink(temporary_.c_str());
    temporary_.clear();
  }
  throw Error(ErrorCode::conflict, "others keep removing what is not written yet").at_path(path_);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty() && made_here_) ::unlink(temporary_.c_str());
}

void AtomicFile::write_at(std::uint64_t offset, ByteView bytes) {
  open_file().write_at(offset, bytes);
}

void AtomicFile::commit() {
  const Fd fd = open_file().finish();
  if (temporary_.empty()) {
    link(fd.get());
  } else {
    move_into_place(temporary_, path_, if_exists_);
  }
  temporary_.clear();
}

// Gives the file without a name the one it is to have. A link never replaces: where there is
// something to replace, a rename ends it.
void AtomicFile::link(int fd) {
  const auto link_to = [fd](const std::string& name) {
    if (::linkat(AT_FDCWD, link_of(fd).c_str(), AT_FDCWD, name.c_str(), AT_SYMLINK_FOLLOW) == 0)
      return true;
    const int error = errno;
    const bool is_done = error == EEXIST && is_at(id_of(fd), name);
    errno = error;
    return is_done;
  };
  if (link_to(path_)) {
    sync_directory(directory_of(path_));
    return;
  }
  if (errno != EEXIST || if_exists_ == IfExists::fail) throw_errno(errno, "link into place", path_);
  (void)try_lock(fd);
  std::string temporary = temporary_path(path_);
  if (!link_to(temporary)) throw_errno(errno, "link", path_);
  temporary_ = std::move(temporary);  // without memory, so that it goes whatever fails
  move_into_place(temporary_, path_, if_exists_);
}

FileWriter& AtomicFile::open_file() {
  if (!file_->is_open()) {
    throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
  }
  return *file_;
}

}  // namespace tessera
