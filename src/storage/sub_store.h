// A directory of a store as a store of its own.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "tessera/new_directory.h"
#include "tessera/storage.h"
#include "tessera/store_copy.h"
#include "tessera/store_hold.h"

namespace tessera {

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
