// Calls of the system that are steps.
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "stepping_store.h"

// In the place of the system's functions, for the libraries that this program is made of.
extern "C" {
int fsync(int fd) {
  tessera::testing::step("fsync", "");
  return static_cast<int>(::syscall(SYS_fsync, fd));
}
int linkat(int from_directory, const char* from, int to_directory, const char* to,
           int flags) noexcept {
  tessera::testing::step("linkat", to);
  return static_cast<int>(::syscall(SYS_linkat, from_directory, from, to_directory, to, flags));
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  tessera::testing::step("renameat2", to);
  return static_cast<int>(::syscall(SYS_renameat2, from_directory, from, to_directory, to, flags));
}
int unlink(const char* path) noexcept {
  tessera::testing::step("unlink", path);
  return static_cast<int>(::syscall(SYS_unlink, path));
}
}
