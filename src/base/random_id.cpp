#include "base/random_id.h"

#include <sys/random.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <fmt/format.h>

#include "tessera/error.h"

namespace tessera {
namespace {

std::array<std::uint64_t, 2> random_words() {
  std::array<std::uint64_t, 2> words{};
  std::size_t filled = 0;
  while (filled < sizeof words) {
    const ssize_t got =
        getrandom(reinterpret_cast<char*>(words.data()) + filled, sizeof words - filled, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw Error(ErrorCode::io, std::string("getrandom: ") + std::strerror(errno));
    filled += static_cast<std::size_t>(got);
  }
  return words;
}

}  // namespace

std::string random_attempt() {
  return fmt::format("{:016x}", random_words()[0]).substr(0, kAttemptDigits);
}

bool is_attempt(std::string_view text) {
  return text.size() == kAttemptDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

std::string random_uuid() {
  auto [high, low] = random_words();
  high = (high & ~0xF000ULL) | 0x4000ULL;      // version 4
  low = (low & ~(3ULL << 62)) | (2ULL << 62);  // RFC 4122 variant
  return fmt::format("{:08x}-{:04x}-{:04x}-{:04x}-{:012x}", high >> 32, (high >> 16) & 0xFFFF,
                     high & 0xFFFF, low >> 48, low & 0xFFFFFFFFFFFFULL);
}

}  // namespace tessera
