// The meeting of the ranks of a mesh.
#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>

#include "comm/launcher.h"

namespace tessera {

// The store that the launcher's variables lead to, the same for all meshes of a process. Throws
// `invalid_argument` naming a wrong or missing variable.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> store_from_environment(
    const LaunchedRank& launched, std::chrono::milliseconds deadline);

// A part of `store` that nobody has used, the same for all ranks. Meshes may be made one after the
// other through one store, and again by ranks whose attempt has failed, however many attempts the
// others have made: what was left by those before is not found. Calls of it have the deadline if
// those of `store` have, or it is a TCPStore (torch/deadline_store.h). Collective; `timeout` names
// the rank that did not come, or the store that does not answer.
[[nodiscard]] c10::intrusive_ptr<c10d::Store> meet(const c10::intrusive_ptr<c10d::Store>& store,
                                                   int rank, int size,
                                                   std::chrono::milliseconds deadline);

}  // namespace tessera
