#include "checkpoint/digests/state_file.h"

#include <algorithm>
#include <vector>

#include "base/digest.h"

namespace tessera {
namespace {

// The save's id is among the last bytes of the file, behind the digests.
constexpr std::uint64_t kEnd = 256;

}  // namespace

std::uint64_t save_mark_of(const Store& directory) {
  if (!directory.exists(kStateFile)) return 0;
  const auto source = directory.open(kStateFile);
  std::vector<std::byte> end(static_cast<std::size_t>(std::min(source->size(), kEnd)));
  source->read_at(source->size() - end.size(), end);
  return digest64(end);
}

bool holds_other_save(const Store& directory, std::uint64_t mark) {
  const std::uint64_t held = save_mark_of(directory);
  return held != 0 && held != mark;
}

}  // namespace tessera
