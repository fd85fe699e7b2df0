// A store for work that may be asked to end before it is done.
#pragma once

#include <memory>
#include <stop_token>

#include "tessera/storage.h"

namespace tessera {

// `store`, but looking something up in it throws `cancelled` once `stop` is requested. What is read
// of objects that are open goes on. `store` itself, if nobody can request it.
[[nodiscard]] std::shared_ptr<Store> stopping_store(std::shared_ptr<Store> store,
                                                    std::stop_token stop);

}  // namespace tessera
