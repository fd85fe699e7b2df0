// What somebody may have meant who typed a name that is not there.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#pragma GCC visibility push(default)  // the command links it, see cmake/TesseraShared.cmake
namespace tessera {

// The name nearest to `typed`: at most two letters inserted, left out, changed or swapped with
// their neighbour, and fewer than half of it. Empty: none is that near, or more than 256 letters
// were typed.
[[nodiscard]] std::string nearest(std::string_view typed, const std::vector<std::string>& names);

}  // namespace tessera
#pragma GCC visibility pop
