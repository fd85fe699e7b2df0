// A store whose objects are read through a local cache.
#pragma once

#include <memory>

#include "storage/cache/block_cache.h"
#include "tessera/storage.h"

namespace tessera {

// Objects without an identity are not kept. Writes go to the store.
[[nodiscard]] std::shared_ptr<Store> caching_store(std::shared_ptr<Store> store,
                                                   std::shared_ptr<BlockCache> cache);
// The same with what use_local_cache() has said; `store` itself if that is nothing.
[[nodiscard]] std::shared_ptr<Store> with_local_cache(std::shared_ptr<Store> store);

}  // namespace tessera
