// A stream of a device beside the one that computes.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace tessera {

// Of the thread's current stream of `device`.
inline c10::Event mark_current(at::Device device) {
  c10::Event event(device.type());
  event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
  return event;
}
// What follows on the current stream comes after `event`.
inline void make_current_wait(const c10::Event& event, at::Device device) {
  event.block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

// Whether the current stream of `device` records a graph. Before 2.13 libtorch does not tell: there
// CUDA itself refuses to wait for what is outside of the graph.
template <typename Guard = c10::impl::VirtualGuardImpl>
bool is_capturing(at::Device device) {
  if constexpr (requires(const Guard& guard, c10::Stream stream) {
                  guard.isStreamCapturing(stream);
                }) {
    const Guard guard(device.type());
    return guard.isStreamCapturing(guard.getStream(device));
  } else {
    return false;
  }
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
  // Of what it has begun.
  [[nodiscard]] c10::Event mark() const {
    c10::Event event(stream_.device_type());
    event.record(stream_);
    return event;
  }

 private:
  c10::Stream stream_;
};

}  // namespace tessera
