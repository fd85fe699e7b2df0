#include "torch/test_device/test_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "comm/whereabouts.h"
#include "torch/device_memory.h"

namespace tessera::testing {
namespace {

// As CUDA has them: the pool is gone through again and again.
constexpr int kPooledStreams = 32;

struct Download {
  Moment moment;
  void* to;
  std::vector<char> bytes;
};
struct Upload {
  Moment moment;
  const void* from;
  std::vector<char> bytes;
};

struct Device {
  std::map<c10::StreamId, Line> streams = {};
  Line host = race_log().add_line();
  DeviceCounts counts = {};
  std::vector<Download> downloads = {};
  std::vector<Upload> uploads = {};
  c10::StreamId next_pooled = 1;
};

struct State {
  std::recursive_mutex mutex;
  std::array<Device, kTestDevices> devices;
  std::map<const char*, std::size_t> pinned;
  std::atomic<bool> late_events = false;
  std::atomic<bool> captures = false;
};

// Tensors in static places may outlive it.
State& state() {
  static auto& all = *new State;
  return all;
}

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, kTestDevices> current_streams = {};
thread_local int uncounted = 0;

// Between the name of a kernel and where the program was.
constexpr std::string_view kBeforePlace = " (";

std::string here() {
  const auto where = whereabouts();
  return where.empty() ? "" : std::string(kBeforePlace) + where + ")";
}

Device& device_at(int index) {
  return state().devices.at(static_cast<std::size_t>(index));
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, test_device(device), id);
}

// What a wait has brought: copies of the past, in order. An upload has read its source by then, so
// the source must still be what it was.
void deliver(int index) {
  auto& device = device_at(index);
  const auto clock = race_log().clock(device.host);
  const auto is_over = [&](const auto& copy) {
    return clock.at(copy.moment.line) >= copy.moment.time;
  };
  for (const auto& copy : device.downloads) {
    if (is_over(copy)) std::memcpy(copy.to, copy.bytes.data(), copy.bytes.size());
  }
  for (const auto& copy : device.uploads) {
    if (is_over(copy) && std::memcmp(copy.from, copy.bytes.data(), copy.bytes.size()) != 0)
      race_log().report("the host changed what " + copy.moment.what + " may not have read yet");
  }
  std::erase_if(device.downloads, is_over);
  std::erase_if(device.uploads, is_over);
}

void learn(int device, const Clock& clock) {
  const std::lock_guard lock(state().mutex);
  race_log().join(device_at(device).host, clock);
  deliver(device);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    void* first = bytes == 0 ? nullptr : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (first != nullptr) std::memset(first, 0xA5, bytes);
    const auto device = current_device;
    race_log().allocate(first, bytes, line_of(stream_of(device, current_streams.at(device))),
                        device_at(device).host);
    return {first, first, &release, test_device(device)};
  }
  static void release(void* first) {
    if (first == nullptr) return;
    race_log().free(first, here());
    std::free(first);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

// As CUDA does: it waits for copies with the memory, not with the host.
void forget_pinned(void* first) {
  const std::lock_guard lock(state().mutex);
  const auto* begin = static_cast<const char*>(first);
  const auto found = state().pinned.find(begin);
  const auto* end = begin + found->second;
  const auto is_in = [&](const void* address) {
    return begin <= static_cast<const char*>(address) && static_cast<const char*>(address) < end;
  };
  for (auto& device : state().devices) {
    std::erase_if(device.downloads, [&](const auto& copy) { return is_in(copy.to); });
    std::erase_if(device.uploads, [&](const auto& copy) { return is_in(copy.from); });
  }
  state().pinned.erase(found);
}

std::atomic<int> locks_made{0}, locks_held{0};

int lock_pages(void* bytes, std::size_t size, unsigned /*flags*/) {
  const std::lock_guard lock(state().mutex);
  state().pinned.emplace(static_cast<const char*>(bytes), size);
  ++locks_made;
  ++locks_held;
  return 0;
}
int unlock_pages(void* bytes) {
  forget_pinned(bytes);
  --locks_held;
  return 0;
}

// Page-locked memory of the host.
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    auto* first = static_cast<char*>(std::aligned_alloc(64, (bytes + 64) / 64 * 64));
    const std::lock_guard lock(state().mutex);
    state().pinned.emplace(first, bytes);
    return {first, first, &release, at::kCPU};
  }
  static void release(void* first) {
    if (first == nullptr) return;
    forget_pinned(first);
    std::free(first);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &device_allocator)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kTestDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device, device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto& all = *new std::vector<at::Generator>;
    const std::lock_guard lock(state().mutex);
    while (all.size() < kTestDevices) all.push_back(at::detail::createCPUGenerator());
    return all.at(static_cast<std::size_t>(device < 0 ? current_device : device));
  }
  at::Device getDeviceFromPtr(void*) const override { return test_device(current_device); }
  bool isPinnedPtr(const void* data) const override { return is_pinned_memory(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

// What an event stands for.
struct Mark {
  Clock clock;
  int device;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return at::kPrivateUse1; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return test_device(std::exchange(current_device, device.index()));
  }
  c10::Device getDevice() const override { return test_device(current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    return stream_of(device.index(), current_streams.at(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    const std::lock_guard lock(state().mutex);
    auto& next = device_at(device.index()).next_pooled;
    const auto id = next;
    next = id % kPooledStreams + 1;
    return stream_of(device.index(), id);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(stream.device_index(),
                     std::exchange(current_streams.at(stream.device_index()), stream.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kTestDevices; }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = new Mark;
    // The stream knows what the host did when it was told to record.
    auto clock = race_log().clock(line_of(stream));
    clock.join(race_log().clock(host_of(stream.device_index())));
    *static_cast<Mark*>(*event) = {std::move(clock), stream.device_index()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (uncounted == 0) {
      const std::lock_guard lock(state().mutex);
      ++device_at(stream.device_index()).counts.stream_waits[stream.id()];
    }
    race_log().join(line_of(stream), static_cast<Mark*>(event)->clock);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto& mark = *static_cast<Mark*>(event);
    if (state().late_events) return false;
    learn(mark.device, mark.clock);
    return true;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& mark = *static_cast<Mark*>(event);
    note_wait(mark.device, mark.clock, "an event");
  }
  bool queryStream(const c10::Stream& stream) const override {
    if (state().late_events) return false;
    learn(stream.device_index(), race_log().clock(line_of(stream)));
    return true;
  }
  // Libtorch has it to override since 2.13.  NOLINTNEXTLINE(modernize-use-override)
  bool isStreamCapturing(const c10::Stream&) const { return state().captures; }
  void synchronizeStream(const c10::Stream& stream) const override {
    note_wait(stream.device_index(), race_log().clock(line_of(stream)), "a stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    Clock all;
    {
      const std::lock_guard lock(state().mutex);
      for (const auto& [id, line] : device_at(device).streams) all.join(race_log().clock(line));
    }
    note_wait(device, all, "the device");
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

const bool hooks_registered = [] {
  c10::register_privateuse1_backend("tests");
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

RaceLog& race_log() {
  static auto& log = *new RaceLog;
  return log;
}

int DeviceCounts::all_launches() const {
  int sum = 0;
  for (const auto& [name, count] : launches) sum += count;
  return sum;
}

DeviceCounts take_counts(int device) {
  const std::lock_guard lock(state().mutex);
  return std::exchange(device_at(device).counts, {});
}

std::vector<std::string> take_races() {
  return race_log().take_races();
}

Uncounted::Uncounted() {
  ++uncounted;
}
Uncounted::~Uncounted() {
  --uncounted;
}

void set_capturing(bool captures) {
  state().captures = captures;
}
void set_late_events(bool late) {
  state().late_events = late;
}

Line line_of(const c10::Stream& stream) {
  const std::lock_guard lock(state().mutex);
  auto& streams = device_at(stream.device_index()).streams;
  const auto known = streams.find(stream.id());
  if (known != streams.end()) return known->second;
  return streams.emplace(stream.id(), race_log().add_line()).first->second;
}

Line host_of(int device) {
  return device_at(device).host;
}

Moment launch(int device, const std::string& name) {
  if (uncounted == 0) {
    const std::lock_guard lock(state().mutex);
    ++device_at(device).counts.launches[name];
  }
  const auto index = static_cast<c10::DeviceIndex>(device);
  return race_log().begin(line_of(stream_of(index, current_streams.at(device))), host_of(device),
                          name + here());
}

void touch(const Moment& moment, const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  std::int64_t last = 0;
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto bytes = static_cast<std::size_t>(last + 1) * tensor.element_size();
  race_log().touch(moment, tensor.const_data_ptr(), bytes, writes);
  if (!writes || uncounted > 0) return;
  const std::lock_guard lock(state().mutex);
  auto& written = device_at(tensor.device().index()).counts.written;
  written[moment.what.substr(0, moment.what.find(kBeforePlace))] += tensor.nbytes();
}

at::Tensor on_host(const at::Tensor& tensor, Access access) {
  if (!tensor.defined() || !tensor.is_privateuseone()) return tensor;
  auto& memory = *tensor.storage().unsafeGetStorageImpl();
  auto* const first =
      access == Access::bytes ? memory.mutable_data() : memory._mutable_data_ptr_no_checks().get();
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       at::DataPtr(
                           first, new c10::Storage(tensor.storage()),
                           [](void* kept) { delete static_cast<c10::Storage*>(kept); }, at::kCPU),
                       /*allocator=*/nullptr, /*resizable=*/false);
  auto host = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* const impl = host.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  host._set_conj(tensor.is_conj());
  host._set_neg(tensor.is_neg());
  return host;
}

void note_wait(int device, const Clock& clock, const std::string& what) {
  if (uncounted > 0) return;
  const std::lock_guard lock(state().mutex);
  device_at(device).counts.waits.push_back(what + here());
  learn(device, clock);
}

void download(int device, const Moment& moment, void* to, const void* from, std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  const auto* first = static_cast<const char*>(from);
  device_at(device).downloads.push_back({moment, to, {first, first + bytes}});
  std::memset(to, 0xA5, bytes);
}

void upload(int device, const Moment& moment, const void* from, std::size_t bytes) {
  const std::lock_guard lock(state().mutex);
  const auto* first = static_cast<const char*>(from);
  device_at(device).uploads.push_back({moment, from, {first, first + bytes}});
}

void count_pageable(int device, const std::string& what) {
  if (uncounted > 0) return;
  const std::lock_guard lock(state().mutex);
  device_at(device).counts.pageable.push_back(what + here());
}

bool is_pinned_memory(const void* pointer) {
  const std::lock_guard lock(state().mutex);
  const auto* address = static_cast<const char*>(pointer);
  auto after = state().pinned.upper_bound(address);
  if (after == state().pinned.begin()) return false;
  const auto& [first, bytes] = *std::prev(after);
  return address < first + std::max<std::size_t>(bytes, 1);
}

PageLocks::PageLocks() {
  set_page_lock({.lock = &lock_pages, .unlock = &unlock_pages});
}
PageLocks::~PageLocks() {
  set_page_lock({});
}
int PageLocks::made() {
  return locks_made;
}
int PageLocks::held() {
  return locks_held;
}

}  // namespace tessera::testing
