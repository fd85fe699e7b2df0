// Stores in front of another one.
#pragma once

#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/new_directory.h"
#include "tessera/storage.h"
#include "tessera/store_copy.h"
#include "tessera/store_hold.h"

namespace tessera {

// A Store that hands everything on to another one; derive from it to change what is different.

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

// A store for work that may be asked to end before it is done.

// `store`, but looking something up in it throws `cancelled` once `stop` is requested. What is read
// of objects that are open goes on. `store` itself, if nobody can request it.
[[nodiscard]] std::shared_ptr<Store> stopping_store(std::shared_ptr<Store> store,
                                                    std::stop_token stop);

// A directory of a store as a store of its own.

// Keeps the parent alive only when given as a shared pointer.
class SubStore final : public Store {
 public:
  SubStore(Store& parent, std::string directory)
      : parent_(parent), prefix_(std::move(directory) + "/"), name_(parent.name() + "/" + prefix_) {
    name_.pop_back();
  }
  SubStore(std::shared_ptr<Store> parent, std::string directory)
      : SubStore(*parent, std::move(directory)) {
    owner_ = std::move(parent);
  }

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return renamed(parent_.list(directory(prefix)));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return renamed(parent_.list_level(directory(prefix)));
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view prefix) const override {
    return parent_.list_directories(directory(prefix));
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    return parent_.exists(full(name));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return parent_.open(full(name));
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return parent_.create(full(name), if_exists, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    return parent_.replace(full(name), expected, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    return parent_.share(full(name));
  }
  StoreCopied copy(const StoreCopy& what) override {
    StoreCopy below = what;
    below.name = full(what.name);
    return parent_.copy(below);
  }
  void remove(std::string_view name) override { parent_.remove(full(name)); }
  void require_writable(std::string_view probe, bool is_only_writer) override {
    parent_.require_writable(full(probe), is_only_writer);
  }
  // Those of the whole parent: a store does not say which are whose.
  void remove_unfinished() override { parent_.remove_unfinished(); }
  void sync() override { parent_.sync(); }
  [[nodiscard]] std::unique_ptr<StoreHold> hold(std::string_view below) override {
    return parent_.hold(directory(below));
  }
  [[nodiscard]] std::optional<std::uint64_t> free_bytes() const override {
    return parent_.free_bytes();
  }
  [[nodiscard]] bool may_show_late() const override { return parent_.may_show_late(); }

 private:
  [[nodiscard]] std::string directory(std::string_view prefix) const {
    std::string directory = prefix_ + std::string(prefix);
    while (directory.ends_with('/')) directory.pop_back();
    return directory;
  }
  [[nodiscard]] std::vector<ObjectInfo> renamed(std::vector<ObjectInfo> objects) const {
    for (ObjectInfo& object : objects) object.name.erase(0, prefix_.size());
    return objects;
  }
  // The parent refuses an absolute name only at its own root.
  [[nodiscard]] std::string full(std::string_view name) const {
    return prefix_ + std::string(name);
  }

  Store& parent_;
  std::string prefix_;  // ends with a slash
  std::string name_;
  std::shared_ptr<Store> owner_;
};

}  // namespace tessera
