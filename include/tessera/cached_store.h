// A store with copies of some of its files on a disk that is nearer, which somebody else has made:
// OLMo's load takes such a directory. A cache that fills itself is in local_cache.h.
#pragma once

#include <memory>

#include "tessera/storage.h"

namespace [[gnu::visibility("default")]] tessera {

// The directory `of`, some of whose files are read from the directory `cache`; each is a path, a
// store, or with Location::name a directory in a store. What there is, the store says, and the
// cache is trusted with nothing. A copy is taken only if it has the size of the file there, and
//   - if digests of the file are recorded, each part that is read agrees with them;
//   - else if its last MiB equals that of the file, where archives of torch.save have the CRC-32s
//   of
//     all that is in them; and of a DCP checkpoint, if the cache's `.metadata` is the same, too.
// Otherwise, and from the moment that a read of the copy fails or does not agree, the file comes
// from the store. Digests are read once from the store: this is for one checkpoint, while it stays
// as it is.
//
// Nothing is ever written into the cache. Writes go to the store, and after the first one all reads
// do, too.
[[nodiscard]] std::shared_ptr<Store> cached_store(const Location& of, const Location& cache);

}  // namespace tessera
