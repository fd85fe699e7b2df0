// A store far away, as it was when it was first asked.
#pragma once

#include <memory>

#include "tessera/storage.h"

namespace tessera {

// Asks `store` once for what the opening of a checkpoint asks several times: a level is listed
// once, and answers for the names in it; an object is opened once, and if it has at most 1 MiB its
// bytes are read once. What a listing does not have is asked for before it is `not_found`. An
// object that is replaced meanwhile is `conflict` when it is read, as the store's sources say, or
// when a later listing tells it. Always asked anew is the file that tells one save into a directory
// from the next (digests/state_file.h). Writes go to the store; after one everything is asked anew.
//
// `lists`: false for the store of a single object, whose level may be long: names are asked for one
// by one.
[[nodiscard]] std::shared_ptr<Store> snapshot_store(std::shared_ptr<Store> store, bool lists);

}  // namespace tessera
