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

bool try_lock(int fd, int kind) {
  return uninterrupted([=] { return ::flock(fd, kind | LOCK_NB); }) == 0 || errno != EWOULDBLOCK;
}

}  // namespace

bool try_lock(int fd) {
  return try_lock(fd, LOCK_EX);
}

bool try_shared_lock(int fd) {
  return try_lock(fd, LOCK_SH);
}

Fd locked_directory(const std::string& path) {
  Fd fd = opened(path, O_RDONLY | O_DIRECTORY);
  if (!fd) throw_errno(errno, "open directory", path);
  if (!try_lock(fd.get())) {
    throw Error(ErrorCode::conflict, "another process writes into the directory").at_path(path);
  }
  return fd;
}

void remove_abandoned(const std::string& path) {
  const Fd fd = opened(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK);
  if (!fd || !is_own(fd) || !try_lock(fd.get())) return;
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
