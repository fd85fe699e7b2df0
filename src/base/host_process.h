// Which process of a host is meant, and whether it still runs.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

#include "base/process.h"

namespace tessera::same_host {

struct ProcessId {
  std::string host;           // the kernel's boot id and the namespace that process numbers are of
  pid_t pid = 0;              // within that namespace
  std::uint64_t started = 0;  // clock ticks since boot: numbers are used again

  [[nodiscard]] bool operator==(const ProcessId&) const = default;
};

// The kernel's boot id, whatever the namespaces; empty where /proc does not tell.
[[nodiscard]] std::string boot_id();
// Throws `unsupported` where /proc does not tell.
[[nodiscard]] ProcessId this_process();
// A digest of this host, as ProcessId names it; 0 where that is not known.
[[nodiscard]] std::uint64_t host_digest() noexcept;

[[nodiscard]] std::string to_text(const ProcessId& process);
// Throws `corrupt` for a text that to_text did not make.
[[nodiscard]] ProcessId process_from_text(const std::string& text);

// Watches a process of this host.
class Watch {
 public:
  // Throws `peer_failed` when the process has ended, `unsupported` when the kernel cannot watch.
  explicit Watch(const ProcessId& process);
  // False from the moment on at which the process has ended, zombies included.
  [[nodiscard]] bool alive() const noexcept;

 private:
  Fd pidfd_;
};

// Whether a process runs; none: it is of another host or container, or the kernel does not tell.
[[nodiscard]] std::optional<bool> is_alive(const ProcessId& process);

}  // namespace tessera::same_host
