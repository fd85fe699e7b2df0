// What this process has taken, as Linux says it, and a limit to what it may take more.
#pragma once

#include <sys/resource.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "tessera/error.h"

namespace tessera::testing {

// A number of /proc/self/status: VmData, VmHWM.
inline std::uint64_t status_kib(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with(key + ":")) return std::stoull(line.substr(key.size() + 1));
  return 0;
}

inline void limit_memory(std::uint64_t more) {
  const std::uint64_t bytes = (status_kib("VmData") << 10) + more;
  const rlimit limit{bytes, bytes};
  if (::setrlimit(RLIMIT_DATA, &limit) != 0) throw Error(ErrorCode::io, "no limit");
}

}  // namespace tessera::testing
