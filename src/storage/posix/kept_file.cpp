#include "storage/posix/kept_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "storage/posix/system.h"

namespace tessera {
namespace {

Fd open_left(const std::string& path, int flags) {
  return Fd(
      ::open(path.c_str(), O_WRONLY | O_CREAT | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | flags, 0666));
}

bool is_usable(const Fd& fd) {
  struct stat status {};
  return fd && ::fstat(fd.get(), &status) == 0 && S_ISREG(status.st_mode) && status.st_nlink == 1;
}

Fd open_or_make(const std::string& path) {
  make_directories(std::filesystem::path(path).parent_path().string());
  Fd fd = open_left(path, 0);
  if (!is_usable(fd)) {
    ::unlink(path.c_str());
    fd = open_left(path, O_EXCL);
    if (!fd) throw_errno(errno, "create", path);
  }
  // What is read back comes from the device then, unless it still has to go there: a page that
  // could not be written is clean in memory and absent from the device.
  ::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED);
  return fd;
}

}  // namespace

KeptFile::KeptFile(std::string path, std::uint64_t size_hint)
    : path_(std::move(path)), file_(open_or_make(path_), path_) {
  file_.reserve(size_hint);
}

void KeptFile::write_at(std::uint64_t offset, ByteView bytes) {
  file_.write_at(offset, bytes);
}

void KeptFile::keep_at(std::uint64_t offset, ByteView bytes) {
  file_.keep(offset + bytes.size());
}

void KeptFile::commit() {
  try {
    file_.finish();
  } catch (...) {
    ::unlink(path_.c_str());
    throw;
  }
}

}  // namespace tessera
