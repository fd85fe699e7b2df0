// What the programs of this directory measure.
#pragma once

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <string>

namespace tessera::bench {

// Seconds on a clock that only goes forward.
inline double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Peak resident memory of this process, MB.
inline long peak_memory() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmHWM:")) return std::atol(line.c_str() + 6) / 1024;
  }
  return 0;
}

}  // namespace tessera::bench
