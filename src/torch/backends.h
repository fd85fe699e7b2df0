// The c10d backends that serve a process group. The only file that knows whether libtorch has CUDA.
#pragma once

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <string>

#include "tessera/mesh.h"

namespace tessera {

// The device of a rank when nobody chose one.
[[nodiscard]] torch::Device default_device(int local_rank);

// Whether collectives of what is on `device` go through the host's memory. Then ranks may share it.
[[nodiscard]] bool goes_over_host(torch::Device device);
// The name of the device on this host, whatever this process may see of them: for CUDA its place on
// the bus, by which NCCL compares them too.
[[nodiscard]] std::string physical_name(torch::Device device);

// A group of Gloo for tensors on the CPU and, for a mesh on CUDA, NCCL for those on the device. For
// a mesh on the CPU of one host shared memory comes before Gloo, see MeshOptions::same_host. What
// no backend serves, and CUDA with TESSERA_CUDA_BACKEND=gloo, goes through the host's memory.
// Collective.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> make_process_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, torch::Device device,
    const MeshOptions& options);

// A group that a program has made, as a mesh on `device` uses it: itself, where it has a backend
// for the device and the CPU and one of them is its default. Else one of its backends, to which
// Gloo is added where it has none for the CPU. Throws `invalid_argument` where it has none for
// `device`. Collective.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> with_messages(
    const c10::intrusive_ptr<c10d::ProcessGroup>& group,
    const c10::intrusive_ptr<c10d::Store>& store, torch::Device device, const MeshOptions& options);

// A second group of the same ranks for reductions, where a communicator runs one collective after
// the other in the order in which the host started them, whatever the streams: a gather of the next
// unit would wait for the reduction before it. Null where that is not so: `group` does both.
// Collective like it.
[[nodiscard]] c10::intrusive_ptr<c10d::ProcessGroup> make_reduction_group(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, torch::Device device,
    const MeshOptions& options);

}  // namespace tessera
