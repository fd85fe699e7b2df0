// What killed saves and replaced checkpoints left in a DCP directory.
#pragma once

#include <string>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// Removes unfinished files, probes, and data files and side files that do not belong to the present
// `.metadata`. Without a `.metadata` only those with names of ours go: they belong to nobody. Only
// while nobody writes.
void remove_leftovers(Store& store);

// The objects of the DCP directory that it would remove.
[[nodiscard]] std::vector<std::string> leftovers_in(const Store& store);

}  // namespace tessera
