// Group over a c10d process group: byte messages as uint8 tensors on the CPU.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <memory>

#include "tessera/comm.h"
#include "torch/call_names.h"

namespace tessera {

// `names`: of the group, or null.
[[nodiscard]] std::unique_ptr<Group> make_torch_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      std::shared_ptr<CallNames> names);

}  // namespace tessera
