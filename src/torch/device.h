// Which device a mesh computes on, whether a module's parameters can get there, and what has to
// have happened there before ranks compute.
#pragma once

#include <torch/types.h>

#include <functional>
#include <vector>

namespace tessera {

// The device asked for; without an index the current one of its type, with a warning (fsdp-rows
// X9). `current` gives that one's index; it is not asked for the CPU or the meta device.
[[nodiscard]] torch::Device resolve_device(torch::Device asked, int rank,
                                           const std::function<int()>& current);

// Whether `device` computes beside the host, which need not wait for it: neither the CPU nor meta.
[[nodiscard]] inline bool is_accelerator(torch::Device device) noexcept {
  return !device.is_cpu() && !device.is_meta();
}

// Parameters on the CPU are moved to the mesh's device, others have to be there. Throws
// `invalid_argument` otherwise, in PyTorch's words (fsdp-rows L9, X6 to X8, C10).
void require_movable(const std::vector<torch::Device>& parameters, torch::Device mesh, int rank);

// set_data, also to and from the meta device and those of other makers, which set_data refuses.
void replace_data(const at::Tensor& tensor, const at::Tensor& data);

// libtorch hands sqrt, exp and the like of CPU tensors to MKL, which chooses a kernel at the first
// call of each, without a lock: when two threads make it at once, ranks or workers of one rank, one
// may get a kernel with an error of 2e-4 for that call (pytorch/pytorch#188792). Makes these first
// calls, once a process; other threads that come here wait for the end.
void settle_vector_math();

}  // namespace tessera
