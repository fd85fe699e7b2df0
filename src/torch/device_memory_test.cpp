// Devices of libtorch as the core sees them. There is no GPU here: a backend of our own stands for
// it, whose streams do nothing before somebody waits for an event behind the work.
#include "torch/device_memory.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <torch/torch.h>

#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "conformance/device_conformance.h"
#include "conformance/errors.h"
#include "conformance/temporary_directory.h"
#include "tessera/checkpoint.h"
#include "torch/tensor.h"

namespace tessera {
namespace {

const at::Device kQueued(at::kPrivateUse1, 0);

// The work of all streams of the backend.
class Queues {
 public:
  void add(c10::StreamId stream, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queues_[stream].push_back(std::move(work));
  }
  // Events are numbers of what was queued on a stream before them.
  std::size_t mark(c10::StreamId stream) {
    const std::lock_guard lock(mutex_);
    return done_[stream] + queues_[stream].size();
  }
  void run_to(c10::StreamId stream, std::size_t mark) {
    const std::lock_guard lock(mutex_);
    for (; done_[stream] < mark; ++done_[stream]) {
      queues_[stream].front()();
      queues_[stream].pop_front();
    }
  }
  [[nodiscard]] bool idle() {
    const std::lock_guard lock(mutex_);
    return std::ranges::all_of(queues_, [](const auto& queue) { return queue.second.empty(); });
  }

 private:
  std::mutex mutex_;
  std::map<c10::StreamId, std::deque<std::function<void()>>> queues_;
  std::map<c10::StreamId, std::size_t> done_;
};

Queues& queues() {
  static Queues all;
  return all;
}

thread_local c10::StreamId current_stream = 0;
std::atomic<bool> copies_fail = false;
std::atomic<bool> events_fail = false;

struct Mark {
  c10::StreamId stream = 0;
  std::size_t position = 0;
};

struct QueuedGuard final : c10::impl::DeviceGuardImplInterface {
  [[nodiscard]] c10::DeviceType type() const override { return at::kPrivateUse1; }
  [[nodiscard]] c10::Device exchangeDevice(c10::Device) const override { return kQueued; }
  [[nodiscard]] c10::Device getDevice() const override { return kQueued; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  [[nodiscard]] c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, kQueued, current_stream);
  }
  [[nodiscard]] c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    return c10::Stream(c10::Stream::UNSAFE, kQueued, std::exchange(current_stream, stream.id()));
  }
  [[nodiscard]] c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    *event = new Mark{stream.id(), queues().mark(stream.id())};
  }
  void block(void*, const c10::Stream&) const override {}
  [[nodiscard]] bool queryEvent(void*) const override { return false; }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Mark*>(event);
  }
  void synchronizeEvent(void* event) const override {
    const auto* mark = static_cast<Mark*>(event);
    queues().run_to(mark->stream, mark->position);
    TORCH_CHECK(!events_fail, "an illegal memory access was encountered");
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    queues().run_to(stream.id(), queues().mark(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, QueuedGuard)

// What stands for page-locked memory.
struct PageLocked final : c10::Allocator {
  std::atomic<int> blocks = 0;
  c10::DataPtr allocate(std::size_t bytes) override {
    ++blocks;
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};
PageLocked page_locked;

struct QueuedHooks final : at::PrivateUse1HooksInterface {
  [[nodiscard]] bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  [[nodiscard]] bool isPinnedPtr(const void*) const override { return false; }
  [[nodiscard]] at::Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
};
const bool hooks_registered = [] {
  c10::register_privateuse1_backend("queued");
  at::RegisterPrivateUse1HooksInterface(new QueuedHooks);
  return true;
}();

at::Tensor& queue_copy(at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  TORCH_CHECK(!copies_fail, "out of resources");
  EXPECT_TRUE(non_blocking);
  queues().add(current_stream, [to = to, from = from] {
    std::memcpy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  });
  return to;
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("copy_", TORCH_FN(queue_copy));
  library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
}

// The same memory as a tensor of the backend.
at::Tensor queued(const at::Tensor& host) {
  return at::from_blob(
      host.mutable_data_ptr(), host.sizes(), host.strides(), [host](void*) {},
      host.options().device(kQueued), kQueued);
}

DeviceSubject subject_of(const std::vector<std::byte>& bytes, bool on_device) {
  const auto host = at::empty({static_cast<std::int64_t>(bytes.size())}, at::kByte);
  if (!bytes.empty()) std::memcpy(host.mutable_data_ptr(), bytes.data(), bytes.size());
  return {device_memory_of(on_device ? queued(host) : host), [host] {
            const auto* first = static_cast<const std::byte*>(host.const_data_ptr());
            return std::vector<std::byte>(first, first + host.numel());
          }};
}

INSTANTIATE_TEST_SUITE_P(TorchCpu, DeviceConformance,
                         ::testing::Values([](const std::vector<std::byte>& bytes) {
                           return subject_of(bytes, false);
                         }));
INSTANTIATE_TEST_SUITE_P(TorchQueued, DeviceConformance,
                         ::testing::Values([](const std::vector<std::byte>& bytes) {
                           return subject_of(bytes, true);
                         }));

// A kernel that the current stream has not begun with.
void queue_fill(const at::Tensor& host, double value) {
  queues().add(current_stream, [host, value] { host.fill_(value); });
}

// Copies from and to other memory wait for the device.
TEST(DeviceMemory, WindowsOfAnyDeviceArePageLocked) {
  const auto before = page_locked.blocks.load();
  const auto window = device_memory_of(queued(at::zeros({1000})))->window(4000);
  EXPECT_EQ(page_locked.blocks, before + 1);
  const auto host = device_memory_of(at::zeros({1000}))->window(4000);
  EXPECT_EQ(page_locked.blocks, before + 1);
}

TEST(DeviceMemory, CopiesComeAfterWhatTheCallersStreamHasQueued) {
  const auto host = at::zeros({1000});
  current_stream = 3;
  const auto leaf = leaf_of(queued(host));
  current_stream = 0;  // a thread that saves has another stream
  DeviceMemory& memory = *leaf.pieces[0].storage->device;
  const auto window = memory.window(4000);
  const ReadRange out{0, window.bytes};
  current_stream = 3;
  queue_fill(host, 5);
  current_stream = 0;
  memory.copy_out({&out, 1})->wait();
  EXPECT_EQ(reinterpret_cast<const float*>(window.bytes.data())[999], 5);
  std::ranges::fill(window.bytes, std::byte{0});
  const WriteRange in{0, window.bytes};
  current_stream = 3;
  queue_fill(host, 7);
  current_stream = 0;
  memory.copy_in({&in, 1})->wait();
  EXPECT_EQ(host.abs().sum().item<float>(), 0);
  EXPECT_EQ(current_stream, 0);
  EXPECT_TRUE(queues().idle());
}

TEST(DeviceMemory, FailuresAreErrors) {
  const auto made = subject_of(std::vector<std::byte>(100), true);
  const auto window = made.memory->window(100);
  const ReadRange out{0, window.bytes};
  events_fail = true;
  auto copy = made.memory->copy_out({&out, 1});
  Error error = error_of([&] { copy->wait(); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_NE(error.message().find("illegal memory access"), std::string::npos) << error.what();
  EXPECT_NO_THROW(copy.reset());
  EXPECT_NO_THROW(made.memory->copy_out({&out, 1}).reset());
  events_fail = false;
  copies_fail = true;
  error = error_of([&] { made.memory->copy_out({&out, 1}); });
  EXPECT_EQ(error.code(), ErrorCode::io);
  EXPECT_NE(error.message().find("out of resources"), std::string::npos) << error.what();
  copies_fail = false;
  EXPECT_TRUE(queues().idle());
}

TEST(DeviceMemory, LeavesAndTensorsShareIt) {
  const auto host = at::arange(24, at::kFloat).reshape({4, 6});
  const auto leaf = leaf_of(queued(host).t());
  EXPECT_EQ(leaf.pieces[0].storage->data, nullptr);
  EXPECT_EQ(leaf.pieces[0].storage->device->device(), kQueued.str());
  EXPECT_EQ(leaf.pieces[0].storage->location, "cpu");
  const auto back = tensor_of(leaf);
  EXPECT_EQ(back.device(), kQueued);
  EXPECT_EQ(back.sizes(), host.t().sizes());
  EXPECT_EQ(back.strides(), host.t().strides());
  EXPECT_EQ(back.const_data_ptr(), host.const_data_ptr());
  const auto narrow = tensor_of(leaf_of(queued(host.reshape({24})).narrow(0, 5, 3)));
  EXPECT_EQ(narrow.const_data_ptr(), static_cast<const float*>(host.const_data_ptr()) + 5);
}

// Windows of more than one MiB, at strides and not, of several types.
std::vector<at::Tensor> some_tensors() {
  return {at::randn({700, 900}), at::randn({700, 900}).t(), at::randn({31}).to(at::kBFloat16),
          at::randn({9, 9}) > 0, at::zeros({0, 4}),         at::full({}, 7.0, at::kDouble)};
}

Value tree_of(const std::vector<at::Tensor>& tensors, bool on_device) {
  Value tree = Value::dict();
  for (std::size_t i = 0; i < tensors.size(); ++i)
    tree.set_item(std::to_string(i), leaf_of(on_device ? queued(tensors[i]) : tensors[i]));
  return tree;
}

TEST(DeviceMemory, TensorsGoToCheckpointsAndBack) {
  const TemporaryDirectory directory;
  const auto tensors = some_tensors();
  for (const char* name : {"/a", "/a.pt", "/a.safetensors"}) {
    save(tree_of(tensors, true), directory.path() + name);
    for (const bool on_device : {false, true}) {
      std::vector<at::Tensor> loaded;
      for (const auto& tensor : tensors) loaded.push_back(at::zeros_like(tensor));
      Value tree = tree_of(loaded, on_device);
      load(tree, directory.path() + name);
      for (std::size_t i = 0; i < tensors.size(); ++i)
        EXPECT_TRUE(torch::equal(loaded[i], tensors[i])) << name << " " << i << " " << on_device;
    }
  }
  EXPECT_TRUE(queues().idle());
}

TEST(DeviceMemory, OtherDevicesAreUnsupported) {
  const auto meta = at::empty({3}, at::kMeta);
  EXPECT_EQ(code_of([&] { (void)leaf_of(meta); }), ErrorCode::unsupported);
  EXPECT_EQ(code_of([&] { (void)leaf_of(at::zeros({3, 3}).to_sparse()); }), ErrorCode::unsupported);
}

}  // namespace
}  // namespace tessera
