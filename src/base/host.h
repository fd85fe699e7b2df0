// What this machine is called.
#pragma once

#include <unistd.h>

#include <array>
#include <string>

namespace tessera {

// Empty if the system does not say.
[[nodiscard]] inline std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "";
  return name.data();
}

}  // namespace tessera
