// The connection of two ranks as a Gloo group of these two.
//
// Gloo connects all ranks of a group with all, so a group of many ranks would cost each of them a
// connection to every other. Groups of two cost what is used, and when one breaks the others go on.
#pragma once

#include <chrono>
#include <memory>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "comm/tree_group.h"
#include "tessera/comm.h"
#include "torch/call_names.h"

namespace gloo::transport {
class Device;
}

namespace tessera {

// The network device that Gloo uses: the one of GLOO_SOCKET_IFNAME, or that of this host's name.
[[nodiscard]] std::shared_ptr<gloo::transport::Device> make_gloo_device();

// Writing to a peer that is gone must be an error and not the end of this process, as in Python,
// which does the same: ignores SIGPIPE, unless the program handles it.
void survive_broken_pipes();

// How rank `rank` of `size` connects with its neighbours in the tree. Two ranks connect when both
// have called this with a store that they share; that takes at most the deadline. With several
// ranks the process survives broken pipes from then on.
[[nodiscard]] Connect connect_by_gloo(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                      std::chrono::milliseconds deadline);

// Group over a c10d process group: byte messages as uint8 tensors on the CPU.

// `names`: of the group, or null.
[[nodiscard]] std::unique_ptr<Group> make_torch_group(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      std::shared_ptr<CallNames> names);

}  // namespace tessera
