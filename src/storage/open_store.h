// Which store a path or a URL means.
#pragma once

#include <cstdint>
#include <string>

#include "tessera/storage.h"

namespace tessera {

// Whether open_store() gives something else for it than a directory of this machine. "./s3://b" is
// a path, and file:///b is none that is remote.
[[nodiscard]] bool is_remote(const std::string& path);
// Of file://, the path; anything else as it is. Throws `invalid_argument` for file://HOST/.
[[nodiscard]] std::string without_file_scheme(const std::string& path);

// What this process has sent by the stores of URLs so far.
struct RemoteTraffic {
  std::uint64_t requests = 0, retries = 0, bytes_again = 0;  // as IoReport has them
};
[[nodiscard]] RemoteTraffic remote_traffic();

}  // namespace tessera
