#include "storage/posix/system.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "base/fd.h"
#include "base/one_of.h"
#include "tessera/error.h"

namespace tessera {
namespace {

ErrorCode code_of(int error_number) {
  if (is_one_of(error_number, ENOENT, ENOTDIR)) return ErrorCode::not_found;
  if (error_number == EEXIST) return ErrorCode::already_exists;
  if (is_one_of(error_number, ENOSPC, EDQUOT)) return ErrorCode::out_of_space;
  return ErrorCode::io;
}

// Whether the directory is there. Throws for something else under its name.
bool is_there(const std::string& directory) {
  struct stat status {};
  if (::stat(directory.c_str(), &status) != 0) return false;
  if (S_ISDIR(status.st_mode)) return true;
  throw Error(ErrorCode::already_exists, "a file is where a directory is needed")
      .at_path(directory);
}

}  // namespace

void throw_errno(int error_number, const std::string& operation, const std::string& path) {
  throw Error(code_of(error_number),
              operation + ": " + std::generic_category().message(error_number))
      .at_path(path);
}

bool lacks_flag(int error_number) {
  return is_one_of(error_number, EINVAL, ENOSYS);
}

std::string directory_of(const std::filesystem::path& path) {
  const std::string directory = path.parent_path().string();
  return directory.empty() ? "." : directory;
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

void require_local(const std::string& path) {
  constexpr std::string_view kSchemeCharacters =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+.-";
  const std::size_t end = path.find_first_not_of(kSchemeCharacters);
  if (end == 0 || end == std::string::npos || path.compare(end, 3, "://") != 0) return;
  throw Error(ErrorCode::unsupported, "no store is built for " + path.substr(0, end) +
                                          ":// URLs; paths of this machine are supported")
      .at_path(path);
}

void sync_directory(const std::string& directory) {
  const Fd fd(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) throw_errno(errno, "open directory", directory);
  if (::fsync(fd.get()) != 0) throw_errno(errno, "fsync", directory);
}

void make_directories(const std::string& directory) {
  if (directory.empty() || is_there(directory)) return;
  const std::string parent = std::filesystem::path(directory).parent_path().string();
  if (parent != directory) make_directories(parent);
  if (::mkdir(directory.c_str(), 0777) != 0) {
    if (errno != EEXIST) throw_errno(errno, "make directory", directory);
    return;  // somebody else was faster, and syncs it
  }
  sync_directory(directory_of(directory));
}

}  // namespace tessera
