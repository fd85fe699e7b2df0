// Transport through the memory that the ranks of one host share: shards and gradients are copied
// from where they are into slots, and from slots to where they are needed; no array in between.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "torch/transport.h"

namespace tessera {

// Null when the ranks of `group` do not share a host.
[[nodiscard]] std::unique_ptr<Transport> make_same_host_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group);

}  // namespace tessera
