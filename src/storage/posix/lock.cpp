#include "storage/posix/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>

#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {

bool try_lock(int fd) {
  return ::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK;
}

Fd locked_directory(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_errno(errno, "open directory", path);
  if (!try_lock(fd.get())) {
    throw Error(ErrorCode::conflict, "another process writes into the directory").at_path(path);
  }
  return fd;
}

void remove_abandoned(const std::string& path) {
  const Fd fd(::open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK));
  struct stat status {};
  if (!fd || ::fstat(fd.get(), &status) != 0 || status.st_uid != ::geteuid()) return;
  if (!try_lock(fd.get())) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

}  // namespace tessera
