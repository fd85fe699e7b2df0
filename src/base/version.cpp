#include "tessera/version.h"

namespace tessera {
namespace {

constexpr int number_of(std::string_view text) {
  int parts[3] = {};
  int at = 0;
  for (const char c : text) {
    if (c == '.') {
      ++at;
    } else {
      parts[at] = 10 * parts[at] + (c - '0');
    }
  }
  return 10000 * parts[0] + 100 * parts[1] + parts[2];
}

// The build says it once, in CMakeLists.txt, and the header has to agree.
static_assert(std::string_view(TESSERA_VERSION) == TESSERA_VERSION_STRING);
static_assert(number_of(TESSERA_VERSION_STRING) == TESSERA_VERSION_NUMBER);

}  // namespace

std::string_view version() noexcept {
  return TESSERA_VERSION_STRING;
}

}  // namespace tessera
