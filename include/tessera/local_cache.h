// Blocks of remote objects on a disk of this machine, for whoever reads checkpoints by their URLs.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] tessera {

struct LocalCache {
  // May hold other things: the cache has a directory of its own in it, tessera-blocks-UID, and
  // touches nothing else.
  std::string directory;
  // What it may grow to. Blocks that were not used for longest go first.
  std::uint64_t most_bytes = std::uint64_t{50} << 30U;
};

// From now on what this process reads of checkpoints at URLs is kept there, and read from there if
// the object still is the version that it was: of the same address, its query included, and with
// the same strong ETag. What has none is not kept. Each MiB has a digest, so damage is no more than
// a miss. Processes of one user may share a directory, and those of several users, each of whom has
// blocks of its own. A disk that is full or cannot be written is told once, and costs nothing else.
// Throws `unsafe` if what is at tessera-blocks-UID is not a directory of this user alone with the
// cache's marker, and `unsupported` if that is of another version. Without a value it ends. Not
// while another thread opens checkpoints.
void use_local_cache(std::optional<LocalCache> cache);

}  // namespace tessera
