// An object of a store that is opened when it is first read.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "tessera/storage.h"

namespace tessera {

class LazySource final : public ByteSource {
 public:
  LazySource(std::shared_ptr<const Store> store, ObjectInfo object)
      : store_(std::move(store)),
        object_(std::move(object)),
        name_(store_->name() + "/" + object_.name) {}

  [[nodiscard]] std::uint64_t size() const override { return object_.size; }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    source().read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] bool checked() const override { return source().checked(); }

 private:
  [[nodiscard]] const ByteSource& source() const {
    std::call_once(opened_, [this] { source_ = store_->open(object_.name); });
    return *source_;
  }

  std::shared_ptr<const Store> store_;
  ObjectInfo object_;
  std::string name_;
  mutable std::once_flag opened_;
  mutable std::shared_ptr<ByteSource> source_;  // set under opened_
};

}  // namespace tessera
