// Where a directory of checkpoints is.
#pragma once

#include <memory>
#include <string>

#include "tessera/storage.h"

namespace tessera {

// A directory as a store: of a path, a store's root, or a directory in a store.
[[nodiscard]] std::shared_ptr<Store> directory_store(const Location& where);

}  // namespace tessera
