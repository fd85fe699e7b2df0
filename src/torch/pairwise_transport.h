// Transport by messages between pairs of ranks, for Gloo: its collectives hand their work to
// threads, its messages do not, and its reduce-scatter moves twice what it has to.
// docs/performance.md has the numbers.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "torch/call_names.h"
#include "torch/transport.h"

namespace tessera {

// Null without `names`: unless `group` is Gloo's.
[[nodiscard]] std::unique_ptr<Transport> make_pairwise_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<CallNames> names);

}  // namespace tessera
