// The version of the library. What a version may change: docs/versions.md.
#pragma once

#include <string_view>

// Of the headers: major * 10000 + minor * 100 + patch.
#define TESSERA_VERSION_NUMBER 100
#define TESSERA_VERSION_STRING "0.1.0"

namespace [[gnu::visibility("default")]] tessera {

// Of the library that runs, as TESSERA_VERSION_STRING has it.
[[nodiscard]] std::string_view version() noexcept;

}  // namespace tessera
