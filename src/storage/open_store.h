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

}  // namespace tessera
