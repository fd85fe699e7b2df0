// A device for tests of training without a GPU: libtorch's PrivateUse1, whose memory is the host's
// and whose kernels are the CPU's. Linking this file registers it.
//
// It computes at once, and it knows what a GPU would have done: kernels that could run at the same
// time and touch the same memory (race_log.h), waits of the host, copies that wait because the
// host's memory is not page-locked, and launches by name. What a copy to page-locked memory brings
// is there when the host has waited for it, and poison until then. It refuses what CUDA refuses: a
// tensor of the CPU among those of the device, unless it is one number.
//
// Four devices, so that threads can be ranks: each thread has a current device, and the devices do
// not know of each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "torch/test_device/race_log.h"

namespace tessera::testing {

inline constexpr int kTestDevices = 4;
[[nodiscard]] inline at::Device test_device(int index) {
  return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)};
}

struct DeviceCounts {
  std::map<std::string, int> launches = {};
  // Bytes, by kernel, of copies from the host too.
  std::map<std::string, std::uint64_t> written = {};
  std::vector<std::string> waits = {};     // of the host, with where it was
  std::vector<std::string> pageable = {};  // copies that should not wait and do
  // Events that a stream was told to wait for, by its number: 0 is the one that computes.
  std::map<c10::StreamId, int> stream_waits = {};
  [[nodiscard]] int all_launches() const;
};
// Counts since the last call. Uncounted adds nothing.
[[nodiscard]] DeviceCounts take_counts(int device);
[[nodiscard]] std::vector<std::string> take_races();

// What this thread does on the device, while it lives, is another library's, as NCCL's is: it is
// not counted, and the host does not know what it has waited for. Its races are found.
class [[nodiscard]] Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

// While it lives, the device page-locks memory of the host that it did not make itself, as
// cudaHostRegister does. One at a time.
class [[nodiscard]] PageLocks {
 public:
  PageLocks();
  ~PageLocks();
  PageLocks(const PageLocks&) = delete;
  PageLocks& operator=(const PageLocks&) = delete;
  [[nodiscard]] static int made();  // so far
  [[nodiscard]] static int held();
};

// Events are not there until somebody waits for them: who asks hears "not yet".
void set_late_events(bool late);
// Streams say that they record a graph.
void set_capturing(bool captures);

// For kernels and collectives of tests -----------------------------------------------------------

// The lines of a stream and of its device's host.
[[nodiscard]] Line line_of(const c10::Stream& stream);
[[nodiscard]] Line host_of(int device);
[[nodiscard]] RaceLog& race_log();
// A kernel on the current stream of `device`, counted.
[[nodiscard]] Moment launch(int device, const std::string& name);
// It touches what the tensor shows, from its first byte to its last.
void touch(const Moment& moment, const at::Tensor& tensor, bool writes);
// The same bytes as a tensor of the CPU. Keeps them alive. `shape`: nobody touches them, and they
// may be gone.
enum class Access : std::uint8_t { bytes, shape };
[[nodiscard]] at::Tensor on_host(const at::Tensor& tensor, Access access = Access::bytes);

// The host has waited for `clock`: what was copied to it before is there.
void note_wait(int device, const Clock& clock, const std::string& what);
// A copy to page-locked memory, at `moment`.
void download(int device, const Moment& moment, void* to, const void* from, std::size_t bytes);
// A copy from it.
void upload(int device, const Moment& moment, const void* from, std::size_t bytes);
void count_pageable(int device, const std::string& what);
[[nodiscard]] bool is_pinned_memory(const void* pointer);

}  // namespace tessera::testing
