// Transport by the collectives of a c10d process group (Gloo, NCCL).
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "torch/transport.h"

namespace tessera {

// `reductions`: a group of the same ranks for sums; null: `group`.
[[nodiscard]] std::unique_ptr<Transport> make_c10d_transport(
    c10::intrusive_ptr<c10d::ProcessGroup> group,
    c10::intrusive_ptr<c10d::ProcessGroup> reductions = {});

}  // namespace tessera
