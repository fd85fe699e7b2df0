// Stores in front of another one.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <stop_token>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/storage.h"

namespace tessera {

// A Store that hands everything on to another one; derive from it to change what is different. But
// for open_listed(), which goes by Store through what `open` has become.

class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(std::shared_ptr<Store> inner) : inner_(std::move(inner)) {}
  // `inner` must outlive it.
  explicit ForwardingStore(Store& inner) : inner_(std::shared_ptr<Store>(), &inner) {}

  [[nodiscard]] const std::string& name() const override { return inner_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return looked().list(prefix);
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return looked().list_level(prefix);
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view in) const override {
    return looked().list_directories(in);
  }
  [[nodiscard]] bool exists(std::string_view name) const override { return looked().exists(name); }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return looked().open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return changed().create(name, if_exists, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    return changed().replace(name, expected, size_hint);
  }
  [[nodiscard]] bool has_directories() const override { return inner_->has_directories(); }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    return changed().share(name);
  }
  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    return changed().new_directory(name, if_exists);
  }
  StoreCopied copy(const StoreCopy& what) override { return changed().copy(what); }
  void remove(std::string_view name) override { changed().remove(name); }
  [[nodiscard]] bool is_read_only() const override { return inner_->is_read_only(); }
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
  [[nodiscard]] std::optional<std::vector<UnfinishedUpload>> uploads_begun_before(
      std::chrono::system_clock::time_point then, std::string_view name) const override {
    return inner_->uploads_begun_before(then, name);
  }

 protected:
  [[nodiscard]] Store& inner() const { return *inner_; }
  // Come before everything here that lists or opens, and before everything that changes an object.
  virtual void before_look() const {}
  virtual void before_change() {}

 private:
  [[nodiscard]] Store& looked() const {
    before_look();
    return *inner_;
  }
  [[nodiscard]] Store& changed() {
    before_change();
    return *inner_;
  }

  std::shared_ptr<Store> inner_;
};

// A store for work that may be asked to end before it is done.

// `store`, but looking something up in it throws `cancelled` once `stop` is requested. What is read
// of objects that are open goes on. `store` itself, if nobody can request it.
[[nodiscard]] std::shared_ptr<Store> stopping_store(std::shared_ptr<Store> store,
                                                    std::stop_token stop);

// A directory of a store as a store of its own. It removes what is unfinished in the whole parent:
// a store does not say which of that is whose.

class SubStore final : public ForwardingStore {
 public:
  template <typename Parent>  // a shared pointer, or a store that must outlive it
  SubStore(Parent&& parent, const std::string& directory)
      : ForwardingStore(std::forward<Parent>(parent)),
        prefix_(directory + "/"),
        name_(inner().name() + "/" + directory) {}

  [[nodiscard]] const std::string& name() const override { return name_; }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return renamed(inner().list(directory(prefix)));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return renamed(inner().list_level(directory(prefix)));
  }
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view prefix) const override {
    return inner().list_directories(directory(prefix));
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    return inner().exists(full(name));
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return inner().open(full(name));
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    return inner().create(full(name), if_exists, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    return inner().replace(full(name), expected, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    return inner().share(full(name));
  }
  // None that appear whole: NewDirectory::working() would be a name of the parent's.
  [[nodiscard]] bool has_directories() const override { return false; }
  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    return Store::new_directory(name, if_exists);  // NOLINT(bugprone-parent-virtual-call)
  }
  StoreCopied copy(const StoreCopy& what) override {
    StoreCopy below = what;
    below.name = full(what.name);
    return inner().copy(below);
  }
  void remove(std::string_view name) override { inner().remove(full(name)); }
  void require_writable(std::string_view probe, bool is_only_writer) override {
    inner().require_writable(full(probe), is_only_writer);
  }
  [[nodiscard]] std::unique_ptr<StoreHold> hold(std::string_view below) override {
    return inner().hold(directory(below));
  }
  [[nodiscard]] std::optional<std::vector<UnfinishedUpload>> uploads_begun_before(
      std::chrono::system_clock::time_point then, std::string_view name) const override {
    return inner().uploads_begun_before(then, directory(name));
  }

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

  const std::string prefix_;  // ends with a slash
  const std::string name_;
};

}  // namespace tessera
