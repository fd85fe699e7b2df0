#include "comm/segment.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>
#include <span>
#include <sstream>
#include <string>

#include "base/digest.h"
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

// Field 22 of /proc/PID/stat; nothing when there is no such process.
std::optional<std::uint64_t> start_time(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  if (!std::getline(file, line)) return std::nullopt;
  // The name in parentheses may hold anything; the state, field 3, follows its last one.
  const auto end = line.rfind(')');
  if (end == std::string::npos) return std::nullopt;
  std::istringstream fields(line.substr(end + 1));
  std::string skipped;
  for (int field = 3; field < 22; ++field) fields >> skipped;
  std::uint64_t ticks = 0;
  if (!(fields >> ticks)) return std::nullopt;
  return ticks;
}

std::string host_name() {
  const auto boot = boot_id();
  std::array<char, 64> name{};
  if (boot.empty() || ::readlink("/proc/self/ns/pid", name.data(), name.size() - 1) <= 0) {
    throw Error(ErrorCode::unsupported, "/proc does not say which host this is");
  }
  return boot + "/" + name.data();
}

}  // namespace

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string boot;
  std::getline(file, boot);
  return boot;
}

ProcessId this_process() {
  const auto started = start_time(::getpid());
  if (!started) {
    throw Error(ErrorCode::unsupported, "/proc does not know this process by its own number");
  }
  return {host_name(), ::getpid(), *started};
}

std::uint64_t host_digest() noexcept {
  try {
    const std::string host = this_process().host;
    return digest64(std::as_bytes(std::span(host)));
  } catch (const Error&) {
    return 0;
  }
}

std::string to_text(const ProcessId& process) {
  return process.host + " " + std::to_string(process.pid) + " " + std::to_string(process.started);
}

ProcessId process_from_text(const std::string& text) {
  std::istringstream words(text);
  ProcessId process;
  if (!(words >> process.host >> process.pid >> process.started) || process.pid <= 0) {
    throw Error(ErrorCode::corrupt, "'" + text + "' does not name a process");
  }
  return process;
}

Watch::Watch(const ProcessId& process)
    : pidfd_(static_cast<int>(::syscall(SYS_pidfd_open, process.pid, 0))) {
  if (!pidfd_ && errno != ESRCH) {
    throw Error(ErrorCode::unsupported, std::string("pidfd_open: ") + std::strerror(errno));
  }
  // Looked at after the descriptor was opened: the number may have come to mean somebody else.
  const auto started = start_time(process.pid);
  if (pidfd_ && !started && alive())
    throw Error(ErrorCode::unsupported,
                "/proc does not show process " + std::to_string(process.pid));
  if (!pidfd_ || started != process.started || !alive()) {
    throw Error(ErrorCode::peer_failed,
                "process " + std::to_string(process.pid) + " has ended already");
  }
}

bool Watch::alive() const noexcept {
  pollfd look{.fd = pidfd_.get(), .events = POLLIN, .revents = 0};
  return ::poll(&look, 1, 0) <= 0;
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
