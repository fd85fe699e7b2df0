// Whether what is to be saved finds room.
#pragma once

#include <cstdint>

#include "tessera/storage.h"

namespace tessera {

// Throws `out_of_space` if the store says that less than `bytes` are free. What a save replaces
// stays until the new checkpoint is there, so its room does not count (fault-rows C14).
void require_free(const Store& store, std::uint64_t bytes);

}  // namespace tessera
