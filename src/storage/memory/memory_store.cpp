// The reference store: what every other store must do, in the fewest words.
#include <cstring>
#include <map>
#include <mutex>
#include <utility>

#include "base/checked.h"
#include "storage/names.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

// The objects, shared by the store and its sinks. An object never changes: a replacement is another
// source, and who has the old one open keeps it.
struct Objects {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<ByteSource>, std::less<>> by_name;  // guarded by mutex
};

[[noreturn]] void refuse_existing(const std::string& path) {
  throw Error(ErrorCode::already_exists, "the object is there already").at_path(path);
}

class MemorySink final : public ByteSink {
 public:
  MemorySink(std::shared_ptr<Objects> objects, std::string key, std::string path,
             IfExists if_exists)
      : objects_(std::move(objects)),
        key_(std::move(key)),
        path_(std::move(path)),
        if_exists_(if_exists) {}

  void write_at(std::uint64_t offset, ByteView bytes) override {
    const std::lock_guard lock(mutex_);
    require_open();
    if (bytes.empty()) return;
    const auto end = narrow<std::size_t>(checked_add<std::uint64_t>(offset, bytes.size()));
    if (end > bytes_.size()) bytes_.resize(end);
    std::memcpy(bytes_.data() + offset, bytes.data(), bytes.size());
  }

  void commit() override {
    const std::lock_guard lock(mutex_);
    require_open();
    open_ = false;
    auto object = memory_source(std::move(bytes_), path_);
    const std::lock_guard objects_lock(objects_->mutex);
    if (if_exists_ == IfExists::fail && objects_->by_name.contains(key_)) refuse_existing(path_);
    objects_->by_name[key_] = std::move(object);
  }

  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  void require_open() const {
    if (!open_) throw Error(ErrorCode::invalid_argument, "already committed").at_path(path_);
  }

  const std::shared_ptr<Objects> objects_;
  const std::string key_;   // in the store
  const std::string path_;  // in an Error
  const IfExists if_exists_;
  std::mutex mutex_;              // guards everything below
  std::vector<std::byte> bytes_;  // what was written so far; gaps are zero
  bool open_ = true;              // until commit
};

class MemoryStore final : public Store {
 public:
  explicit MemoryStore(std::string name) : name_(std::move(name)) {}
  [[nodiscard]] const std::string& name() const override { return name_; }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    if (!prefix.empty()) require_safe_name(prefix, name_);
    const std::string below = prefix.empty() ? std::string() : std::string(prefix) + "/";
    const std::lock_guard lock(objects_->mutex);
    std::vector<ObjectInfo> found;
    for (auto entry = objects_->by_name.lower_bound(below);
         entry != objects_->by_name.end() && entry->first.starts_with(below); ++entry) {
      found.push_back({entry->first, entry->second->size()});
    }
    return found;
  }

  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    std::vector<ObjectInfo> found = list(prefix);
    const std::size_t below = prefix.empty() ? 0 : prefix.size() + 1;
    std::erase_if(found, [below](const ObjectInfo& object) {
      return object.name.find('/', below) != std::string::npos;
    });
    return found;
  }

  [[nodiscard]] bool exists(std::string_view name) const override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    return objects_->by_name.contains(name);
  }

  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    const auto found = objects_->by_name.find(name);
    if (found == objects_->by_name.end()) {
      throw Error(ErrorCode::not_found, "there is no such object").at_path(full(name));
    }
    return found->second;
  }

  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t /*size_hint*/) override {
    if (exists(name) && if_exists == IfExists::fail) refuse_existing(full(name));
    return std::make_unique<MemorySink>(objects_, std::string(name), full(name), if_exists);
  }

  void remove(std::string_view name) override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    const auto found = objects_->by_name.find(name);
    if (found != objects_->by_name.end()) objects_->by_name.erase(found);
  }

  void remove_unfinished() override {}  // a sink that dies takes its bytes along
  void sync() override {}

 private:
  [[nodiscard]] std::string full(std::string_view name) const {
    return name_ + "/" + std::string(name);
  }

  const std::string name_;
  const std::shared_ptr<Objects> objects_ = std::make_shared<Objects>();
};

}  // namespace

std::shared_ptr<Store> memory_store(std::string name) {
  return std::make_shared<MemoryStore>(std::move(name));
}

}  // namespace tessera
