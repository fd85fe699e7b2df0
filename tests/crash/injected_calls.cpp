#include "injected_calls.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <bit>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>

namespace tessera::testing {
namespace {

std::atomic<bool> is_armed = false;
thread_local bool is_inside = false;  // of an action or of what counts: not injected into
std::mutex mutex;                     // guards what follows
Injector state;

// Whether something is to happen at this call.
bool is_due(unsigned call, const char* name, const char* path) {
  if (!is_armed.load(std::memory_order_relaxed) || is_inside) return false;
  const std::lock_guard lock(mutex);
  const Injection& now = state.injection;
  const bool is_helper = ::gettid() != ::getpid();
  ++state.made[is_helper ? 1 : 0][std::countr_zero(call)];
  if ((now.calls & call) == 0 || (now.in_helpers && !is_helper)) return false;
  if (now.at_commit && std::strcmp(path, state.commit_path) != 0) return false;
  ++state.seen;
  if (now.at == 0 || state.seen < now.at || state.seen - now.at >= now.times) return false;
  if (state.hit++ == 0) std::snprintf(state.last, sizeof state.last, "%s %.80s", name, path);
  return true;
}

void act() {
  is_inside = true;
  if (state.injection.action != nullptr) state.injection.action();
  is_inside = false;
}

// Makes the call `real`, or lets it fail as the injection says.
template <typename Real>
auto injected(unsigned call, const char* name, const char* path, Real real) -> decltype(real()) {
  if (!is_due(call, name, path)) return real();
  switch (state.injection.way) {
    case Way::fails_when_done:
      (void)real();
      [[fallthrough]];
    case Way::fails:
      errno = state.injection.error;
      return -1;
    case Way::act_before:
      act();
      return real();
    case Way::act_after: {
      const auto result = real();
      const int error = errno;
      act();
      errno = error;
      return result;
    }
    default:
      return real();
  }
}

int note_commit(int result, const char* path) {
  if (result == 0 && is_armed && std::strcmp(path, state.commit_path) == 0) {
    is_inside = true;
    if (state.on_commit) state.on_commit();
    is_inside = false;
  }
  return result;
}

unsigned call_of_open(int flags) {
  if ((flags & O_TMPFILE) == O_TMPFILE) return kOpenUnnamed;
  if ((flags & O_DIRECTORY) != 0) return kOpenDirectory;
  return (flags & O_ACCMODE) == O_RDONLY ? kOpenToRead : kOpenToWrite;
}

bool is_directory(int fd) {
  struct stat status {};
  return ::fstat(fd, &status) == 0 && S_ISDIR(status.st_mode);
}

bool is_open_to_write(int fd) {
  struct stat status {};
  if (::fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return false;
  return (::fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
}

void* allocated(std::size_t size, std::size_t alignment) {
  if (is_due(kAllocate, "new", "")) return nullptr;
  if (alignment <= alignof(std::max_align_t)) return std::malloc(size);
  return std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
}

void* allocated_or_throw(std::size_t size, std::size_t alignment) {
  void* memory = allocated(size == 0 ? 1 : size, alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void arm(const Injector& injector) {
  state = injector;
  is_armed = true;
}

Injector disarm() {
  is_armed = false;
  const std::lock_guard lock(mutex);
  return state;
}

}  // namespace tessera::testing

using namespace tessera::testing;

void* operator new(std::size_t size) {
  return allocated_or_throw(size, 1);
}
void* operator new[](std::size_t size) {
  return allocated_or_throw(size, 1);
}
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocated_or_throw(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  return allocated(size, 1);
}
void operator delete(void* memory) noexcept {
  std::free(memory);
}
void operator delete[](void* memory) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete[](void* memory, std::size_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}
void operator delete(void* memory, const std::nothrow_t&) noexcept {
  std::free(memory);
}

// In the place of the system's functions, for the libraries that this program is made of.
extern "C" {
int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  return injected(call_of_open(flags), "open", path, [&] {
    return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
  });
}
int close(int fd) {
  const auto real = [fd] { return static_cast<int>(::syscall(SYS_close, fd)); };
  if (!is_armed || is_inside || !is_open_to_write(fd)) return real();
  // The system closes it, whatever it says.
  return injected(kClose, "close", "", [&] { return real(); });
}
ssize_t pwrite(int fd, const void* bytes, std::size_t size, off_t offset) {
  // So that other threads find something to do.
  if (is_armed && state.injection.in_helpers && ::gettid() == ::getpid()) ::usleep(5000);
  if (size > 7 && state.injection.way == Way::is_short && is_due(kWrite, "pwrite", "")) size = 7;
  if (state.injection.way == Way::is_idle && is_due(kWrite, "pwrite", "")) return 0;
  return injected(kWrite, "pwrite", "",
                  [&] { return ::syscall(SYS_pwrite64, fd, bytes, size, offset); });
}
ssize_t pread(int fd, void* bytes, std::size_t size, off_t offset) {
  return injected(kRead, "pread", "",
                  [&] { return ::syscall(SYS_pread64, fd, bytes, size, offset); });
}
int fallocate(int fd, int mode, off_t offset, off_t size) {
  return injected(kReserve, "fallocate", "", [&] {
    return static_cast<int>(::syscall(SYS_fallocate, fd, mode, offset, size));
  });
}
int ftruncate(int fd, off_t size) noexcept {
  return injected(kTruncate, "ftruncate", "",
                  [&] { return static_cast<int>(::syscall(SYS_ftruncate, fd, size)); });
}
// No power is cut here: that nothing goes to the device saves the time of some thousand runs.
int fsync(int fd) {
  const unsigned call = is_armed && is_directory(fd) ? kSyncDirectory : kSync;
  return injected(call, "fsync", "", [] { return 0; });
}
int mkdir(const char* path, mode_t mode) noexcept {
  return injected(kMakeDirectory, "mkdir", path,
                  [&] { return static_cast<int>(::syscall(SYS_mkdirat, AT_FDCWD, path, mode)); });
}
int renameat2(int from_directory, const char* from, int to_directory, const char* to,
              unsigned flags) noexcept {
  return injected(flags == 0 ? kRename : kRenameWithFlags, "renameat2", to, [&] {
    return note_commit(
        static_cast<int>(::syscall(SYS_renameat2, from_directory, from, to_directory, to, flags)),
        to);
  });
}
int rename(const char* from, const char* to) noexcept {
  return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int linkat(int from_directory, const char* from, int to_directory, const char* to,
           int flags) noexcept {
  return injected(kLink, "linkat", to, [&] {
    return note_commit(
        static_cast<int>(::syscall(SYS_linkat, from_directory, from, to_directory, to, flags)), to);
  });
}
int link(const char* from, const char* to) noexcept {
  return ::linkat(AT_FDCWD, from, AT_FDCWD, to, 0);
}
int unlink(const char* path) noexcept {
  return injected(kUnlink, "unlink", path,
                  [&] { return static_cast<int>(::syscall(SYS_unlink, path)); });
}
int unlinkat(int directory, const char* path, int flags) noexcept {
  return injected(kUnlink, "unlinkat", path, [&] {
    return static_cast<int>(::syscall(SYS_unlinkat, directory, path, flags));
  });
}
}
