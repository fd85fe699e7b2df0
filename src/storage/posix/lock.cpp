#include "storage/posix/lock.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <mutex>
#include <vector>

#include "base/process.h"
#include "base/text.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// The descriptors of all locks of this process. A child closes its copies at once: it would keep
// the locks of a parent that is killed.
struct Held {
  ShortMutex mutex;
  std::vector<int> descriptors;  // guarded by mutex
};

// Never destroyed, since threads may outlive main(); made before there are any.
Held& held = *new Held();

void close_in_child() noexcept {
  for (const int fd : held.descriptors) ::close(fd);
  held.descriptors.clear();
}

[[maybe_unused]] const int kRegistered = ::pthread_atfork(nullptr, nullptr, close_in_child);

void note_held(int fd) {
  const std::lock_guard lock(held.mutex);
  held.descriptors.push_back(fd);
}

void forget_held(int fd) noexcept {
  const std::lock_guard lock(held.mutex);
  std::erase(held.descriptors, fd);
}

bool is_attempt_of(std::string_view name, std::string_view start) {
  return name.starts_with(start) && is_attempt(name.substr(start.size()));
}

struct stat status_of(const Fd& fd) {
  struct stat status {};
  (void)::fstat(fd.get(), &status);
  return status;
}

// What root writes in the place of somebody's is that one's from the beginning.
bool is_own(const Fd& fd) {
  return ::geteuid() == 0 || status_of(fd).st_uid == ::geteuid();
}

// The kernel keeps the lock of a directory to itself, whatever file system it is on.
bool reaches_all(const Fd& fd) {
  struct statfs system {};
  return !S_ISDIR(status_of(fd).st_mode) ||
         (::fstatfs(fd.get(), &system) == 0 && is_of_one_host(system));
}

// For writing, if that may be: NFS gives no other lock of a file. None: errno says why.
Fd opened_to_lock(const std::string& path) {
  Fd fd = opened(path, O_RDWR | O_NOFOLLOW | O_NONBLOCK);
  if (!fd && is_one_of(errno, EISDIR, EACCES, EPERM, EROFS))
    fd = opened(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  return fd;
}

Fd opened_or_absent(const std::string& path) {
  Fd fd = opened_to_lock(path);
  if (!fd && errno != ENOENT) throw_errno(errno, "open", path);
  return fd;
}

Locked lock_of(const Fd& fd) {
  const Locked locked = try_lock(fd.get());
  return locked == Locked::yes && !reaches_all(fd) ? Locked::unknown : locked;
}

}  // namespace

Locked try_lock(int fd, LockKind kind) {
  const int operation = (kind == LockKind::alone ? LOCK_EX : LOCK_SH) | LOCK_NB;
  if (uninterrupted([=] { return ::flock(fd, operation); }) == 0) return Locked::yes;
  return errno == EWOULDBLOCK ? Locked::no : Locked::unknown;
}

LockedFd::LockedFd(Fd locked) : fd_(std::move(locked)) {
  note_held(fd_.get());
}

LockedFd& LockedFd::operator=(LockedFd&& other) noexcept {
  unlock();
  fd_ = std::move(other.fd_);
  made_here_ = other.made_here_;
  return *this;
}

// The lock ends by a call, not by closing alone: a child that was forked before it was noted has a
// copy of the descriptor.
void LockedFd::unlock() noexcept {
  if (!fd_) return;
  if (!made_here_) {
    fd_.release();  // closed long ago, and the number may be another file's
    return;
  }
  forget_held(fd_.get());
  (void)::flock(fd_.get(), LOCK_UN);
  fd_ = Fd();
}

LockedFd locked_directory(const std::string& path) {
  Fd fd = opened(path, O_RDONLY | O_DIRECTORY);
  if (!fd) throw_errno(errno, "open directory", path);
  if (try_lock(fd.get()) == Locked::no) {
    throw Error(ErrorCode::conflict, "another process writes into the directory").at_path(path);
  }
  return LockedFd(std::move(fd));
}

Locked is_free(const std::string& path) {
  const Fd fd = opened_or_absent(path);
  return fd ? lock_of(fd) : Locked::yes;
}

bool remove_free(const std::string& path, bool unknown_too) {
  const Fd fd = opened_or_absent(path);
  const Locked locked = fd ? lock_of(fd) : Locked::yes;
  if (locked == Locked::no || (locked == Locked::unknown && !unknown_too)) return false;
  remove_all(path);
  return true;
}

void remove_abandoned(const std::string& path, Hosts hosts) {
  const Fd fd = opened_to_lock(path);
  if (!fd || !is_own(fd)) return;
  const Locked locked = hosts == Hosts::all ? lock_of(fd) : try_lock(fd.get());
  if (locked != Locked::yes) return;
  try {
    remove_all(path);
  } catch (const Error&) {
    return;  // what cannot be removed is in nobody's way
  }
}

void remove_abandoned_attempts(const std::string& directory, std::string_view start,
                               std::filesystem::file_type type) {
  std::vector<std::string> found;
  for (const DirectoryEntry& entry : readable_entries_of(directory)) {
    const bool fits =
        type == std::filesystem::file_type::directory ? entry.is_directory : entry.is_regular_file;
    if (fits && is_attempt_of(entry.name, start)) found.push_back(entry.path);
  }
  for (const std::string& left : found) remove_abandoned(left);
}

}  // namespace tessera
