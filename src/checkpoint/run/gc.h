// What killed writers leave on a disk beside checkpoints.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "storage/storage.h"
#include "tessera/gc.h"

namespace tessera {

struct DiskLeftovers {
  std::vector<Leftover> found;           // unfinished files and directories, with their ages
  std::vector<std::string> directories;  // others, the given one among them
};
// In the directory, below it, and directories beside it that were to become it. Links are not
// followed. Throws `not_found` if there is no such directory.
[[nodiscard]] DiskLeftovers disk_leftovers(const std::string& directory, Time now);

// When the file was written; none: it is not there.
[[nodiscard]] std::optional<Time> written_at(const std::string& path);

}  // namespace tessera
