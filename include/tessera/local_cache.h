// Blocks of remote objects on a disk of this machine, for whoever reads checkpoints by their URLs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] tessera {

struct LocalCache {
  std::string directory;
  // What it may grow to. Blocks that were not used for longest go first.
  std::uint64_t most_bytes = std::uint64_t{50} << 30U;
};

// From now on what this process reads of checkpoints at URLs is kept there, and read from there if
// the object still is the version that it was. Each MiB has a digest, so damage is no more than a
// miss. Processes may share a directory. A disk that is full or cannot be written is told once, and
// costs nothing else. Without a value it ends. Not while another thread opens checkpoints.
void use_local_cache(std::optional<LocalCache> cache);

}  // namespace tessera
