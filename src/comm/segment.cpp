#include "comm/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <string>

#include "tessera/error.h"

namespace tessera::same_host {

void sleep_while(SharedWord& word, std::uint32_t value,
                 std::chrono::milliseconds at_most) noexcept {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(at_most);
  timespec limit{};
  limit.tv_sec = seconds.count();
  limit.tv_nsec = std::chrono::nanoseconds(at_most - seconds).count();
  // Not the private variant: the sleepers are other processes.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void wake_all(SharedWord& word) noexcept {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

namespace {

// Nobody may cut the memory off under a peer's feet.
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

[[noreturn]] void refuse(const std::string& what) {
  const int reason = errno;
  throw Error(
      reason == ENOSPC || reason == ENOMEM ? ErrorCode::out_of_space : ErrorCode::unsupported,
      what + ": " + std::strerror(reason));
}

}  // namespace

Segment::Segment(Fd fd, std::size_t bytes) : fd_(std::move(fd)), bytes_(bytes) {
  void* address =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(), 0);
  if (address == MAP_FAILED) refuse("mapping shared memory");
  data_ = static_cast<std::byte*>(address);
}

Segment::~Segment() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Segment Segment::create(std::size_t bytes) {
  Fd fd(::memfd_create("tessera", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) refuse("memfd_create");
  // Without a reservation a full machine would answer a write with SIGBUS.
  if (::fallocate(fd.get(), 0, 0, static_cast<off_t>(bytes)) != 0) {
    refuse("reserving " + std::to_string(bytes) + " bytes of shared memory");
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) refuse("sealing shared memory");
  return {std::move(fd), bytes};
}

Segment Segment::attach(pid_t pid, int descriptor, std::size_t bytes) {
  const auto path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(descriptor);
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) refuse("opening " + path);
  struct stat status {};
  const int seals = ::fcntl(fd.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || ::fstat(fd.get(), &status) != 0 ||
      status.st_size != static_cast<off_t>(bytes)) {
    throw Error(ErrorCode::unsupported, path + " is not the shared memory that was announced");
  }
  Segment segment(std::move(fd), bytes);
  segment.close_descriptor();
  return segment;
}

}  // namespace tessera::same_host
