#include "base/host_process.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <span>
#include <sstream>

#include "base/digest.h"
#include "tessera/error.h"

namespace tessera::same_host {

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

std::string host_of_processes() {
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
  return {host_of_processes(), ::getpid(), *started};
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

std::optional<bool> is_alive(const ProcessId& process) {
  try {
    if (process.host != this_process().host) return std::nullopt;
    return Watch(process).alive();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::peer_failed) return false;
    return std::nullopt;
  }
}

}  // namespace tessera::same_host
