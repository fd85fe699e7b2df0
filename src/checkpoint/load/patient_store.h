// A store that waits for what another rank sees.
#pragma once

#include <functional>
#include <memory>
#include <stop_token>

#include "tessera/storage.h"

namespace tessera {

// `store`, for objects that rank 0 has found: one that is not there is opened again and again, for
// 90 seconds in all, because a network file system may show it late (fault-rows F24). Opening asks
// the server, where listing may answer from a cache. After that it is `incomplete`, and nothing is
// waited for any more. `is_replaced` says that another checkpoint is there: then what is not there
// is `not_found` at once.
[[nodiscard]] std::shared_ptr<Store> patient_store(std::shared_ptr<Store> store,
                                                   std::stop_token stop,
                                                   std::function<bool()> is_replaced);

}  // namespace tessera
