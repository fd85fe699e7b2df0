// Memory for tests of what happens while a tensor is copied.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "tessera/io.h"

namespace tessera::testing {

// Memory whose copy takes as long as it is told.
class SlowMemory final : public ByteSource {
 public:
  SlowMemory(std::shared_ptr<Storage> bytes, std::chrono::milliseconds pause)
      : bytes_(std::move(bytes)), pause_(pause) {}
  [[nodiscard]] std::uint64_t size() const override { return bytes_->size; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    std::this_thread::sleep_for(pause_);
    std::memcpy(out.data(), bytes_->data + offset, out.size());
  }
  [[nodiscard]] const std::string& name() const override { return name_; }

 private:
  const std::string name_ = "slow memory";
  const std::shared_ptr<Storage> bytes_;
  const std::chrono::milliseconds pause_;
};

}  // namespace tessera::testing
