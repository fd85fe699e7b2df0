#include "storage/posix/work_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

void require_ours(const std::string& path, const struct stat& status) {
  if (!S_ISDIR(status.st_mode)) {
    throw Error(ErrorCode::unsafe, "something is where unfinished work is kept").at_path(path);
  }
  if (status.st_uid != ::geteuid() && status.st_uid != owner_of_ours(path)) {
    throw Error(ErrorCode::unsafe, "unfinished work of another user is in the way").at_path(path);
  }
}

void make_own_directory(const std::string& path) {
  make_directories(fs::path(path).parent_path().string());
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    throw_errno(errno, "make directory", path);
  }
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) {
    if (errno == ENOENT) return;  // its owner is done: the next turn makes it
    throw_errno(errno, "look for", path);
  }
  require_ours(path, status);
}

// None when the directory has gone.
Fd open_journal(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK,
               0666));
  if (!fd && errno != ENOENT) throw_errno(errno, "open", path);
  return fd;
}

void lock_alone(const Fd& journal, const std::string& directory) {
  const Locked locked = try_lock(journal.get());
  if (locked == Locked::yes) return;
  if (locked == Locked::unknown) throw_errno(errno, "lock", directory + "/journal");
  throw Error(ErrorCode::conflict, "another process works on the same target").at_path(directory);
}

// The locked journal; none when the process that had it until now has removed it.
LockedFd lock_journal(const std::string& directory) {
  const std::string path = directory + "/journal";
  Fd fd = open_journal(path);
  if (!fd) return {};
  lock_alone(fd, directory);
  struct stat open {};
  if (::fstat(fd.get(), &open) != 0) throw_errno(errno, "stat", path);
  if (!S_ISREG(open.st_mode)) {
    throw Error(ErrorCode::unsafe, "the journal is not a regular file").at_path(path);
  }
  return is_at(id_of(fd.get()), path) ? LockedFd(std::move(fd)) : LockedFd();
}

}  // namespace

WorkDirectory::WorkDirectory(std::string path) : path_(std::move(path)), content_(path_ + "/new") {
  while (!journal_) {
    make_own_directory(path_);
    journal_ = lock_journal(path_);
  }
}

void WorkDirectory::clear() {
  std::error_code error;
  fs::remove_all(content_, error);
  if (error) throw_errno(error.value(), "remove unfinished work", content_);
}

void WorkDirectory::remove() {
  clear();
  ::unlink((path_ + "/journal").c_str());
  ::rmdir(path_.c_str());
}

}  // namespace tessera
