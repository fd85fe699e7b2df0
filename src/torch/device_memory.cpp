#include "torch/device_memory.h"

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <dlfcn.h>
#include <torch/torch.h>

#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/process.h"
#include "tessera/error.h"

namespace tessera {
namespace {

// work(), whose exceptions become an Error of this code.
template <typename Work>
auto on_device(ErrorCode code, const std::string& device, Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    throw Error(code, device + ": " + text.substr(0, text.find('\n')));
  }
}

at::Tensor host_bytes(const std::byte* bytes, std::size_t size) {
  return at::from_blob(const_cast<std::byte*>(bytes), {static_cast<std::int64_t>(size)},
                       at::TensorOptions(at::kByte));
}

class TorchCopy final : public DeviceCopy {
 public:
  // A copy that is complete when what has been queued on `stream` is.
  TorchCopy(const c10::Stream& stream, std::string device) : device_(std::move(device)) {
    if (stream.device_type() == at::kCPU) return;  // has no events and needs none
    event_.emplace(stream.device_type());
    event_->record(stream);
  }
  ~TorchCopy() override {
    try {
      wait();
    } catch (const Error&) {  // NOLINT(bugprone-empty-catch): nobody asks any more
    }
  }
  void wait() override {
    if (!event_) return;
    on_device(ErrorCode::io, device_, [this] {
      const std::optional<c10::Event> event = std::exchange(event_, std::nullopt);
      event->synchronize();
    });
  }

 private:
  std::string device_;
  std::optional<c10::Event> event_;
};

PageLock& outside_page_lock() {
  static constinit PageLock functions;
  return functions;
}

template <typename Function>
void look_up(const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(::dlsym(RTLD_DEFAULT, name));
}

PageLock page_lock_of(at::DeviceType type) {
  if (type == at::kPrivateUse1) return outside_page_lock();
  PageLock functions;
  if (type != at::kCUDA) return functions;
  look_up("cudaHostRegister", functions.lock);
  look_up("cudaHostUnregister", functions.unlock);
  look_up("cudaGetLastError", functions.forget_error);
  return functions;
}

class TorchMemory final : public DeviceMemory {
 public:
  explicit TorchMemory(const at::Tensor& tensor)
      : TorchMemory(
            tensor.storage(), tensor.device(),
            c10::impl::VirtualGuardImpl(tensor.device().type()).getStream(tensor.device())) {}
  TorchMemory(at::Storage storage, at::Device on, c10::Stream stream)
      : storage_(std::move(storage)),
        first_(static_cast<std::byte*>(storage_.mutable_data())),
        on_(on),
        name_(on_.str()),
        stream_(stream) {}

  [[nodiscard]] std::uint64_t size() const override { return storage_.nbytes(); }
  [[nodiscard]] const std::string& device() const override { return name_; }
  [[nodiscard]] std::uintptr_t address() const override {
    return reinterpret_cast<std::uintptr_t>(first_);
  }

  [[nodiscard]] HostWindow window(std::size_t size) override {
    return on_device(ErrorCode::limit, name_, [&] {
      const auto options = at::TensorOptions(at::kByte).pinned_memory(!on_.is_cpu());
      auto owner =
          std::make_shared<at::Tensor>(at::empty({static_cast<std::int64_t>(size)}, options));
      auto* bytes = static_cast<std::byte*>(owner->mutable_data_ptr());
      return HostWindow{{bytes, size}, std::move(owner)};
    });
  }

  [[nodiscard]] std::unique_ptr<DeviceCopy> copy_out(std::span<const ReadRange> ranges) override {
    return queued([&] {
      for (const ReadRange& range : ranges)
        host_bytes(range.out.data(), range.out.size())
            .copy_(bytes(range.offset, range.out.size()), true);
    });
  }
  [[nodiscard]] std::unique_ptr<DeviceCopy> copy_in(std::span<const WriteRange> ranges) override {
    return queued([&] {
      for (const WriteRange& range : ranges)
        bytes(range.offset, range.bytes.size())
            .copy_(host_bytes(range.bytes.data(), range.bytes.size()), true);
    });
  }

  [[nodiscard]] std::shared_ptr<void> lock_pages(MutableByteView host) override {
    constexpr unsigned kPortable = 1;  // for all devices of the process
    const PageLock functions = page_lock_of(on_.type());
    if (functions.lock == nullptr || functions.unlock == nullptr || host.empty()) return nullptr;
    if (const int error = functions.lock(host.data(), host.size(), kPortable)) {
      if (functions.forget_error != nullptr) (void)functions.forget_error();
      log(LogLevel::info, std::to_string(host.size()) + " bytes could not be page-locked for " +
                              name_ + " (error " + std::to_string(error) +
                              "): copies go through windows");
      return nullptr;
    }
    const MadeHere made_here;
    const auto unlock = [functions, made_here](std::byte* bytes) {
      if (made_here) (void)functions.unlock(bytes);
    };
    return std::shared_ptr<std::byte>(host.data(), unlock);
  }

  [[nodiscard]] std::shared_ptr<DeviceMemory> beside() override {
    if (on_.is_cpu()) return nullptr;
    return on_device(ErrorCode::io, name_, [&] {
      const c10::impl::VirtualGuardImpl device(on_.type());
      const c10::Stream other = device.getStreamFromGlobalPool(on_);
      c10::Event queued(on_.type());
      queued.record(stream_);
      queued.block(other);
      return std::make_shared<TorchMemory>(storage_, on_, other);
    });
  }

  [[nodiscard]] std::byte* first() const { return first_; }
  [[nodiscard]] at::Device on() const { return on_; }

 private:
  [[nodiscard]] at::Tensor bytes(std::uint64_t at, std::size_t size) const {
    return at::from_blob(
        first_ + at, {static_cast<std::int64_t>(size)}, [](void*) {},
        at::TensorOptions(at::kByte).device(on_), on_);
  }

  template <typename Work>
  std::unique_ptr<DeviceCopy> queued(Work&& work) const {
    return on_device(ErrorCode::io, name_, [&]() -> std::unique_ptr<DeviceCopy> {
      const at::NoGradGuard no_grad;
      const c10::StreamGuard guard(stream_);
      try {
        work();
        return std::make_unique<TorchCopy>(stream_, name_);
      } catch (...) {
        // What was queued before the failure must not touch the window any more.
        if (!on_.is_cpu()) stream_.synchronize();
        throw;
      }
    });
  }

  at::Storage storage_;
  std::byte* first_;
  at::Device on_;
  std::string name_;
  c10::Stream stream_;
};

}  // namespace

void set_page_lock(const PageLock& functions) {
  outside_page_lock() = functions;
}

std::shared_ptr<DeviceMemory> device_memory_of(const at::Tensor& tensor) {
  return std::make_shared<TorchMemory>(tensor);
}

at::Tensor tensor_over(const std::shared_ptr<DeviceMemory>& memory, std::uint64_t at,
                       at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type) {
  const auto torch = std::dynamic_pointer_cast<TorchMemory>(memory);
  if (!torch)
    throw Error(ErrorCode::unsupported, "memory on " + memory->device() + " is not libtorch's");
  return at::from_blob(
      torch->first() + at, sizes, strides, [torch](void*) {},
      at::TensorOptions(type).device(torch->on()), torch->on());
}

}  // namespace tessera
