// The device that a mesh computes on, whether a module's parameters can get there, and what has to
// have happened there before ranks compute.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/types.h>

#include "tessera/comm.h"

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

// A device that several ranks share: NCCL's collectives end there with words of its own, at the
// first of them, or wait for ever.

// The device of a rank.
struct RankDevice {
  std::string name;      // as the rank calls it
  std::string host;      // for people
  std::string machine;   // the kernel's boot id: containers of one machine have the same
  std::string physical;  // which device of the machine it is
};

// The devices by rank. Collective.
[[nodiscard]] std::vector<RankDevice> everyones_device(Group& group, torch::Device mine);

// Throws `invalid_argument` that names the ranks which share a device, the first one of those.
void require_own_devices(const std::vector<RankDevice>& by_rank);

// A stream of a device beside the one that computes.

// Marks the end of what the thread's current stream of `device` has begun.
inline c10::Event mark_current(at::Device device) {
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}
// What follows on the current stream comes after `event`.
inline void make_current_wait(const c10::Event& event, at::Device device) {
  event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

class SideStream {
 public:
  // Its work goes before that of other streams. It comes after what the current stream has begun.
  explicit SideStream(at::Device device)
      : stream_(c10::impl::VirtualGuardImpl(device.type())
                    .getStreamFromGlobalPool(device, /*isHighPriority=*/true)) {
    follow_current();
  }
  [[nodiscard]] const c10::Stream& stream() const noexcept { return stream_; }
  // What follows on it comes after what the current stream has begun.
  void follow_current() const { mark_current(stream_.device()).block(stream_); }
  // Marks the end of what it has begun.
  [[nodiscard]] c10::Event mark() const {
    c10::Event event(stream_.device_type());
    event.record(stream_);
    return event;
  }

 private:
  c10::Stream stream_;
};

}  // namespace tessera
