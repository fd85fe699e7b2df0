#include "storage/posix/system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "base/fd.h"
#include "tessera/error.h"

namespace tessera {

void throw_errno(int error_number, const std::string& operation, const std::string& path) {
  ErrorCode code = ErrorCode::io;
  if (error_number == ENOENT || error_number == ENOTDIR) code = ErrorCode::not_found;
  if (error_number == EEXIST) code = ErrorCode::already_exists;
  if (error_number == ENOSPC || error_number == EDQUOT) code = ErrorCode::out_of_space;
  throw Error(code, operation + ": " + std::generic_category().message(error_number)).at_path(path);
}

void sync_directory(const std::string& directory) {
  const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_errno(errno, "open directory", directory);
  if (::fsync(fd.get()) != 0) throw_errno(errno, "fsync", directory);
}

void make_directories(const std::string& directory) {
  if (directory.empty()) return;
  struct stat status {};
  if (::stat(directory.c_str(), &status) == 0) {
    if (S_ISDIR(status.st_mode)) return;
    throw Error(ErrorCode::already_exists, "a file is where a directory is needed")
        .at_path(directory);
  }
  const std::string parent = std::filesystem::path(directory).parent_path().string();
  if (parent != directory) make_directories(parent);
  if (::mkdir(directory.c_str(), 0777) != 0) {
    if (errno != EEXIST) throw_errno(errno, "make directory", directory);
    return;  // somebody else was faster, and syncs it
  }
  sync_directory(parent.empty() ? "." : parent);
}

}  // namespace tessera
