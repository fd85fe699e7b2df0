// Opens a DCP checkpoint: reads and proves what its metadata says, and puts it into a catalog.
#pragma once

#include <memory>

#include "checkpoint/dcp/catalog.h"
#include "tessera/storage.h"

namespace tessera {

// Throws what Checkpoint::open throws for a DCP directory: every chunk lies in its file and on
// bytes of its own, and the chunks of each tensor have every element once (checkpoint-rows P-14).
[[nodiscard]] Bytes read_catalog(const std::shared_ptr<Store>& store);

// Whether a chunk of these sizes gives a tensor nothing: ranks without data leave empty ones
// (checkpoint-rows P-18). An empty tensor keeps its first. `first`: the tensor has no chunk so far.
[[nodiscard]] bool is_needless(std::span<const std::int64_t> sizes, const Shape& shape, bool first);

}  // namespace tessera
