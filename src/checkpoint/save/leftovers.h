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

// Takes those out of a list: of the DCP directory `store`, whose objects have `prefix` before their
// names there.
void drop_leftovers(const Store& store, const std::string& prefix,
                    std::vector<ObjectInfo>& objects);

}  // namespace tessera
