// The files of an interruptible conversion, in its work directory.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>

#include "storage/posix/kept_file.h"
#include "tessera/storage.h"

namespace tessera {

// Shows what was created in this run, as if it had begun with nothing; what is created anew has
// what an earlier run left in it.
class KeptStore final : public Store {
 public:
  explicit KeptStore(const std::string& directory) : files_(posix_store(directory)) {}

  [[nodiscard]] const std::string& name() const override { return files_->name(); }
  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return created_now(files_->list(prefix));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return created_now(files_->list_level(prefix));
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    const std::lock_guard lock(mutex_);
    return created_.contains(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    return files_->open(name);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists,
                                                 std::uint64_t size_hint) override {
    auto file = std::make_unique<KeptFile>(files_->name() + "/" + std::string(name), size_hint);
    const std::lock_guard lock(mutex_);
    created_.emplace(name);
    return file;
  }
  void remove(std::string_view name) override {
    files_->remove(name);
    const std::lock_guard lock(mutex_);
    created_.erase(std::string(name));
  }
  void remove_unfinished() override {}
  void sync() override {}

  // Removes what earlier runs left and this one did not create.
  void remove_strays() {
    for (const ObjectInfo& object : files_->list()) {
      if (!exists(object.name)) files_->remove(object.name);
    }
  }

 private:
  [[nodiscard]] std::vector<ObjectInfo> created_now(std::vector<ObjectInfo> objects) const {
    std::erase_if(objects, [this](const ObjectInfo& object) { return !exists(object.name); });
    return objects;
  }

  std::shared_ptr<Store> files_;
  mutable std::mutex mutex_;
  std::set<std::string, std::less<>> created_;  // guarded by mutex_
};

}  // namespace tessera
