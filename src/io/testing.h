// A source that counts what is read through it, so that read amplification can be told.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "tessera/error.h"
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

// Sources and sinks that fail on purpose, for tests of what happens then.

// When to fail, and how. Shared by all wrappers that are to count together. Once due, it stays due,
// as a full or dead disk does.
class Fault {
 public:
  static constexpr auto kNever = std::numeric_limits<std::uint64_t>::max();

  // Fails the call after `calls` good ones, or the one that would go past `bytes` bytes in all.
  Fault(ErrorCode code, std::uint64_t calls, std::uint64_t bytes = kNever)
      : code_(code), calls_left_(calls), bytes_left_(bytes) {}

  // Counts one call; throws when the fault is due.
  void pass(const std::string& name, std::uint64_t bytes) {
    if (take(calls_left_, 1) && take(bytes_left_, bytes)) return;
    calls_left_ = 0;
    throw Error(code_, "an injected fault").at_path(name);
  }

 private:
  static bool take(std::atomic<std::uint64_t>& left, std::uint64_t amount) {
    std::uint64_t have = left;
    do {
      if (have == kNever) return true;
      if (have < amount) return false;
    } while (!left.compare_exchange_weak(have, have - amount));
    return true;
  }

  const ErrorCode code_;
  std::atomic<std::uint64_t> calls_left_;
  std::atomic<std::uint64_t> bytes_left_;
};

class FaultySource final : public ByteSource {
 public:
  FaultySource(std::shared_ptr<const ByteSource> source, std::shared_ptr<Fault> fault)
      : source_(std::move(source)), fault_(std::move(fault)) {}

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    fault_->pass(name(), out.size());
    source_->read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] bool checked() const override { return source_->checked(); }

 private:
  std::shared_ptr<const ByteSource> source_;
  std::shared_ptr<Fault> fault_;
};

// Counts commit as a call without bytes.
class FaultySink final : public ByteSink {
 public:
  FaultySink(std::unique_ptr<ByteSink> sink, std::shared_ptr<Fault> fault)
      : sink_(std::move(sink)), fault_(std::move(fault)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override {
    fault_->pass(name(), bytes.size());
    sink_->write_at(offset, bytes);
  }
  void commit() override {
    fault_->pass(name(), 0);
    sink_->commit();
  }
  [[nodiscard]] const std::string& name() const override { return sink_->name(); }

 private:
  std::unique_ptr<ByteSink> sink_;
  std::shared_ptr<Fault> fault_;
};

}  // namespace tessera
