// A c10d backend for tensors on a device that no backend serves: their bytes go through the host's
// memory and a backend for the CPU.
//
// Calls look like NCCL's to whoever makes them: they are queued on a stream of the backend's own,
// after what the current stream has begun, and a work's wait() makes the current stream wait, not
// the host. But a call itself waits, for the copy to the host and for the ranks. So ranks make
// their calls in the same order, whatever the communicator.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera {

// `cpu`: does the work. Sums and maxima, gathers, scatters of sums, and broadcasts; other calls
// throw `unsupported`.
[[nodiscard]] c10::intrusive_ptr<c10d::Backend> make_staged_backend(
    c10::intrusive_ptr<c10d::Backend> cpu, at::Device device);

}  // namespace tessera
