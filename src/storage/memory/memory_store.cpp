// The reference store: what every other store must do, in the fewest words.
#include <map>
#include <mutex>
#include <utility>

#include "storage/names.h"
#include "tessera/error.h"
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
    const auto commit = [objects = objects_, key = std::string(name), path = full(name),
                         if_exists](std::vector<std::byte> bytes) {
      auto object = memory_source(std::move(bytes), path);
      const std::lock_guard lock(objects->mutex);
      if (if_exists == IfExists::fail && objects->by_name.contains(key)) refuse_existing(path);
      objects->by_name[key] = std::move(object);
    };
    return memory_sink(full(name), commit);
  }

  void remove(std::string_view name) override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    const auto found = objects_->by_name.find(name);
    if (found != objects_->by_name.end()) objects_->by_name.erase(found);
  }

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
