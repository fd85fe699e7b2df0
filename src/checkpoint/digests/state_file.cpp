#include "checkpoint/digests/state_file.h"

#include "base/digest.h"

namespace tessera {

std::uint64_t save_mark_of(const Store& directory) {
  if (!directory.exists(kStateFile)) return 0;
  return digest64(read_all(*directory.open(kStateFile), kStateFileLimit));
}

}  // namespace tessera
