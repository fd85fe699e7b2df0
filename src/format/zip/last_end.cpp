#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/numbers.h"
#include "format/zip/zip.h"

namespace tessera::zip {
namespace {

constexpr std::uint64_t kCommentReach = 0xFFFF;  // how far a comment can move the end record

}  // namespace

std::optional<LastEnd> last_end(const ByteSource& source) {
  const std::uint64_t size = source.size();
  if (size < kEndSize) return std::nullopt;
  const std::uint64_t reach = std::min(size, kEndSize + kCommentReach);
  std::vector<std::byte> window(static_cast<std::size_t>(reach));
  source.read_at(size - reach, window);
  for (std::uint64_t i = reach - kEndSize + 1; i-- > 0;) {
    if (load_le<std::uint32_t>(window.data() + i) != kEnd) continue;
    const std::uint64_t comment = load_le<std::uint16_t>(window.data() + i + 20);
    const std::uint64_t record = size - reach + i;
    if (comment <= size - record - kEndSize) return LastEnd{record, record + kEndSize + comment};
  }
  return std::nullopt;
}

}  // namespace tessera::zip
