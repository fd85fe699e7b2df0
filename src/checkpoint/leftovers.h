// What killed saves and replaced checkpoints left in a DCP directory.
#pragma once

#include "tessera/storage.h"

namespace tessera {

// Removes unfinished files, and data files that the present `.metadata` does not name. Without a
// `.metadata` only data files with names of ours go: they belong to nobody. Only while nobody
// writes.
void remove_leftovers(Store& store);

}  // namespace tessera
