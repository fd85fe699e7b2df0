// A Store that hands everything on to another one; derive from it to change what is different.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/new_directory.h"
#include "tessera/storage.h"
#include "tessera/store_copy.h"
#include "tessera/store_hold.h"

namespace tessera {

class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(std::shared_ptr<Store> inner) : inner_(std::move(inner)) {}

  [[nodiscard]] const std::string& name() const override { return inner_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return inner_->list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return inner_->list_level(prefix);
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view in) const override {
    return inner_->list_directories(in);
  }
  [[nodiscard]] bool exists(std::string_view name) const override { return inner_->exists(name); }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return inner_->open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return inner_->create(name, if_exists, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    return inner_->replace(name, expected, size_hint);
  }
  [[nodiscard]] bool has_directories() const override { return inner_->has_directories(); }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    return inner_->share(name);
  }
  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    return inner_->new_directory(name, if_exists);
  }
  StoreCopied copy(const StoreCopy& what) override { return inner_->copy(what); }
  void remove(std::string_view name) override { inner_->remove(name); }
  void require_writable(std::string_view probe, bool is_only_writer) override {
    inner_->require_writable(probe, is_only_writer);
  }
  void remove_unfinished() override { inner_->remove_unfinished(); }
  void sync() override { inner_->sync(); }
  [[nodiscard]] std::unique_ptr<StoreHold> hold(std::string_view directory) override {
    return inner_->hold(directory);
  }
  [[nodiscard]] std::optional<std::uint64_t> free_bytes() const override {
    return inner_->free_bytes();
  }
  [[nodiscard]] bool may_show_late() const override { return inner_->may_show_late(); }

 protected:
  [[nodiscard]] Store& inner() const { return *inner_; }

 private:
  std::shared_ptr<Store> inner_;
};

}  // namespace tessera
