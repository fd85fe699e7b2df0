// A device for tests, in host memory. A thread of its own carries out the copies, late, and the
// newest one first. What a window is to hold is poison until somebody has waited for it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "tessera/error.h"
#include "tessera/io.h"

namespace tessera {

class FakeDevice {
 public:
  static constexpr std::byte kPoison{0xDB};

  FakeDevice() : thread_([this](const std::stop_token& stop) { work(stop); }) {}

  [[nodiscard]] const std::string& name() const { return name_; }

  // The copy number `number` from now on fails, 1 being the next one.
  void fail(int number) {
    const std::lock_guard lock(mutex_);
    fail_at_ = copies_ + number;
  }
  // Copies since the beginning, and those that were started and are not waited for yet.
  [[nodiscard]] int copies() const {
    const std::lock_guard lock(mutex_);
    return copies_;
  }
  [[nodiscard]] int open() const {
    const std::lock_guard lock(mutex_);
    return open_;
  }
  // Bytes of the windows that are in use now, and that were in use at one time.
  [[nodiscard]] std::size_t window_bytes() const {
    const std::lock_guard lock(mutex_);
    return window_bytes_;
  }
  [[nodiscard]] std::size_t most_window_bytes() const {
    const std::lock_guard lock(mutex_);
    return most_window_bytes_;
  }

  HostWindow window(std::size_t size) {
    auto owner =
        std::shared_ptr<std::byte>(new std::byte[size + 1], [this, size](std::byte* bytes) {
          {
            const std::lock_guard lock(mutex_);
            windows_.erase(bytes);
            window_bytes_ -= size;
          }
          delete[] bytes;
        });
    const std::lock_guard lock(mutex_);
    windows_.emplace(owner.get(), size);
    window_bytes_ += size;
    most_window_bytes_ = std::max(most_window_bytes_, window_bytes_);
    return {{owner.get(), size}, owner};
  }

  // `out` = false: `places` are read, and written to `device`.
  std::unique_ptr<DeviceCopy> start(MutableByteView device, std::vector<ReadRange> places,
                                    bool out) {
    const auto job = std::make_shared<Job>();
    const std::lock_guard lock(mutex_);
    for (const ReadRange& place : places) require_place(device, place);
    if (out) {
      for (const ReadRange& place : places) std::ranges::fill(place.out, kPoison);
    }
    *job = {device, std::move(places), out, ++copies_ == fail_at_, false, {}};
    ++open_;
    jobs_.push_back(job);
    changed_.notify_all();
    return std::make_unique<FakeCopy>(*this, job);
  }

 private:
  struct Job {
    MutableByteView device;
    std::vector<ReadRange> places;
    bool out = true;
    bool fails = false;
    bool done = false;
    std::vector<std::byte> staged;  // what wait() brings into the window
  };

  class FakeCopy final : public DeviceCopy {
   public:
    FakeCopy(FakeDevice& device, std::shared_ptr<Job> job)
        : device_(device), job_(std::move(job)) {}
    ~FakeCopy() override {
      if (job_) device_.finish(*job_);
    }
    void wait() override {
      const std::shared_ptr<Job> job = std::exchange(job_, nullptr);
      device_.finish(*job);
      if (job->fails) throw Error(ErrorCode::io, "the fake device failed to copy");
      if (!job->out) return;
      const std::byte* from = job->staged.data();
      for (const ReadRange& place : job->places) {
        std::memcpy(place.out.data(), from, place.out.size());
        from += place.out.size();
      }
    }

   private:
    FakeDevice& device_;
    std::shared_ptr<Job> job_;
  };

  void require_place(MutableByteView device, const ReadRange& place) const {
    if (place.offset + place.out.size() > device.size()) ADD_FAILURE() << "beyond the memory";
    const auto after = windows_.upper_bound(place.out.data());
    const bool inside =
        after != windows_.begin() &&
        place.out.data() + place.out.size() <= std::prev(after)->first + std::prev(after)->second;
    if (!inside) ADD_FAILURE() << "a copy that is not to or from a window";
  }

  void finish(const Job& job) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return job.done; });
    --open_;
  }

  static void carry_out(Job& job) {
    if (job.fails) return;
    for (const ReadRange& place : job.places) {
      const auto bytes = job.device.subspan(place.offset, place.out.size());
      if (job.out) {
        job.staged.insert(job.staged.end(), bytes.begin(), bytes.end());
      } else {
        std::ranges::copy(place.out, bytes.begin());
      }
    }
  }

  void work(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [this] { return !jobs_.empty(); })) {
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(20));
      lock.lock();
      const std::shared_ptr<Job> job = jobs_.back();
      jobs_.pop_back();
      lock.unlock();
      carry_out(*job);
      lock.lock();
      job->done = true;
      changed_.notify_all();
    }
  }

  const std::string name_ = "fake:0";
  mutable std::mutex mutex_;  // guards what follows
  std::condition_variable_any changed_;
  std::vector<std::shared_ptr<Job>> jobs_;
  std::map<std::byte*, std::size_t> windows_;
  std::size_t window_bytes_ = 0;
  std::size_t most_window_bytes_ = 0;
  int copies_ = 0;
  int open_ = 0;
  int fail_at_ = -1;
  std::jthread thread_;
};

// Bytes of the host that copies alone may touch. The device must outlive the memory.
class FakeMemory final : public DeviceMemory {
 public:
  FakeMemory(FakeDevice& device, MutableByteView bytes) : device_(device), bytes_(bytes) {}

  [[nodiscard]] std::uint64_t size() const override { return bytes_.size(); }
  [[nodiscard]] const std::string& device() const override { return device_.name(); }
  [[nodiscard]] std::uintptr_t address() const override {
    return reinterpret_cast<std::uintptr_t>(bytes_.data());
  }
  [[nodiscard]] HostWindow window(std::size_t size) override { return device_.window(size); }
  [[nodiscard]] std::unique_ptr<DeviceCopy> copy_out(std::span<const ReadRange> ranges) override {
    return device_.start(bytes_, {ranges.begin(), ranges.end()}, true);
  }
  [[nodiscard]] std::unique_ptr<DeviceCopy> copy_in(std::span<const WriteRange> ranges) override {
    std::vector<ReadRange> places;
    for (const WriteRange& range : ranges) {
      auto* bytes = const_cast<std::byte*>(range.bytes.data());  // read only: `out` is false
      places.push_back({range.offset, {bytes, range.bytes.size()}});
    }
    return device_.start(bytes_, std::move(places), false);
  }

 private:
  FakeDevice& device_;
  MutableByteView bytes_;
};

}  // namespace tessera
