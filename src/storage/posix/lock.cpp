#include "storage/posix/lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <vector>

#include "base/random_id.h"
#include "storage/posix/system.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool is_attempt_of(std::string_view name, std::string_view start) {
  return name.starts_with(start) && is_attempt(name.substr(start.size()));
}

bool is_own(const Fd& fd) {
  struct stat status {};
  return ::fstat(fd.get(), &status) == 0 && status.st_uid == ::geteuid();
}

}  // namespace

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
  if (!fd || !is_own(fd) || !try_lock(fd.get())) return;
  std::error_code ignored;
  std::filesystem::remove_all(path, ignored);
}

void remove_abandoned_attempts(const std::string& directory, std::string_view start,
                               std::filesystem::file_type type) {
  std::vector<std::string> found;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(directory, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    std::error_code unknown;
    if (is_attempt_of(name, start) && entry->symlink_status(unknown).type() == type)
      found.push_back(entry->path().string());
  }
  for (const std::string& left : found) remove_abandoned(left);
}

}  // namespace tessera
