// A group of ranks whose messages Python carries.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>

#include "errands.h"
#include "tessera/comm.h"

namespace tessera::python {

// `carrier` has `rank`, `size`, `gather(message, root)`, `all_gather(message)`,
// `broadcast(message, root)` and `scatter(messages, root)`, for messages of bytes; None: this
// process alone. What it raises is `peer_failed`. Members may be called without the interpreter's
// lock, from any thread. `errands`: who calls the carrier for that thread; null: it does.
[[nodiscard]] std::unique_ptr<Group> group_of(nanobind::handle carrier,
                                              std::shared_ptr<Errands> errands = nullptr);

}  // namespace tessera::python
