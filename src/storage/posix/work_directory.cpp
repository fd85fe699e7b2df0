#include "storage/posix/work_directory.h"

#include <fcntl.h>
#include <sys/file.h>
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

void make_own_directory(const std::string& path) {
  make_directories(fs::path(path).parent_path().string());
  if (::mkdir(path.c_str(), 0777) != 0 && errno != EEXIST) {
    throw_errno(errno, "make directory", path);
  }
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) throw_errno(errno, "look for", path);
  if (S_ISDIR(status.st_mode) && status.st_uid == ::geteuid()) return;
  throw Error(ErrorCode::unsafe, S_ISDIR(status.st_mode)
                                     ? "unfinished work of another user is in the way"
                                     : "something is where unfinished work is kept")
      .at_path(path);
}

// The locked journal; none when the process that had it until now has removed it.
Fd lock_journal(const std::string& directory) {
  const std::string path = directory + "/journal";
  Fd fd(::open(path.c_str(), O_RDWR | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK,
               0666));
  if (!fd && errno == ENOENT) return {};
  if (!fd) throw_errno(errno, "open", path);
  if (::flock(fd.get(), LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) throw_errno(errno, "lock", path);
    throw Error(ErrorCode::conflict, "another process works on the same target").at_path(directory);
  }
  struct stat open {};
  struct stat named {};
  if (::fstat(fd.get(), &open) != 0) throw_errno(errno, "stat", path);
  if (!S_ISREG(open.st_mode)) {
    throw Error(ErrorCode::unsafe, "the journal is not a regular file").at_path(path);
  }
  const bool is_named = ::lstat(path.c_str(), &named) == 0 && named.st_ino == open.st_ino &&
                        named.st_dev == open.st_dev;
  return is_named ? std::move(fd) : Fd();
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
