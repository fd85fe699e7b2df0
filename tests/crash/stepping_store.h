// A store that tells of each step before it takes it. With stepping_calls.cpp the calls below it
// that make something durable or give or take a name tell of theirs.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "conformance/forwarding_store.h"

namespace tessera::testing {

using OnStep = std::function<void(const char* call, std::string_view name)>;
// The listener of this process; empty: nobody listens.
inline OnStep& on_step() {
  static OnStep listener;
  return listener;
}

inline void step(const char* call, std::string_view name) {
  if (on_step()) on_step()(call, name);
}

class SteppingSink final : public ByteSink {
 public:
  SteppingSink(std::unique_ptr<ByteSink> inner, std::string name)
      : inner_(std::move(inner)), object_(std::move(name)) {}
  void write_at(std::uint64_t offset, ByteView bytes) override {
    step("write", object_);
    inner_->write_at(offset, bytes);
  }
  void commit() override {
    step("commit", object_);
    inner_->commit();
  }
  [[nodiscard]] const std::string& name() const override { return inner_->name(); }

 private:
  std::unique_ptr<ByteSink> inner_;
  std::string object_;
};

class SteppingStore final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    step("list", prefix);
    return ForwardingStore::list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    step("list_level", prefix);
    return ForwardingStore::list_level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    step("exists", name);
    return ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    step("open", name);
    return ForwardingStore::open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    step("create", name);
    return std::make_unique<SteppingSink>(ForwardingStore::create(name, if_exists, size_hint),
                                          std::string(name));
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    step("create", name);
    return std::make_unique<SteppingSink>(ForwardingStore::replace(name, expected, size_hint),
                                          std::string(name));
  }
  void remove(std::string_view name) override {
    step("remove", name);
    ForwardingStore::remove(name);
  }
  void remove_unfinished() override {
    step("remove_unfinished", "");
    ForwardingStore::remove_unfinished();
  }
  void sync() override {
    step("sync", "");
    ForwardingStore::sync();
  }
};

}  // namespace tessera::testing
