// A source that counts what is read through it, so that read amplification can be told.
#pragma once

#include <atomic>
#include <memory>
#include <utility>

#include "tessera/io.h"

namespace tessera {

class CountingSource final : public ByteSource {
 public:
  explicit CountingSource(std::shared_ptr<const ByteSource> source) : source_(std::move(source)) {}

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    ++calls_;
    bytes_ += out.size();
    source_->read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] std::uint64_t request_cost() const override { return source_->request_cost(); }
  [[nodiscard]] bool checked() const override { return source_->checked(); }

  // What was asked for so far, failed reads included.
  [[nodiscard]] std::uint64_t calls() const noexcept { return calls_; }
  [[nodiscard]] std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  std::shared_ptr<const ByteSource> source_;
  mutable std::atomic<std::uint64_t> calls_{0};
  mutable std::atomic<std::uint64_t> bytes_{0};
};

}  // namespace tessera
