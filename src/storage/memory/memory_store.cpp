// The reference store: what every other store must do, in the fewest words.
#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <utility>

#include "base/process.h"
#include "io/source.h"
#include "storage/storage.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

// The objects, shared by the store and its sinks. An object never changes: a replacement is another
// source, and who has the old one open keeps it.
struct Objects {
  ShortMutex mutex;
  std::map<std::string, std::shared_ptr<ByteSource>, std::less<>> by_name;  // guarded by mutex
  std::uint64_t written = 0;  // objects so far; guarded by mutex
};

class WholeObject final : public ByteSource {
 public:
  WholeObject(std::vector<std::byte> bytes, std::string path, std::uint64_t version)
      : bytes_(memory_source(std::move(bytes), std::move(path))), version_(version) {}

  [[nodiscard]] std::uint64_t size() const override { return bytes_->size(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    bytes_->read_at(offset, out);
  }
  [[nodiscard]] const std::string& name() const override { return bytes_->name(); }
  [[nodiscard]] std::string version() const override { return std::to_string(version_); }

 private:
  const std::shared_ptr<ByteSource> bytes_;
  const std::uint64_t version_;
};

[[noreturn]] void refuse_existing(const std::string& path) {
  throw Error(ErrorCode::already_exists, "the object is there already").at_path(path);
}

// An object that several writers fill.
class GrowingObject final : public ByteSource {
 public:
  explicit GrowingObject(std::string path) : path_(std::move(path)) {}

  [[nodiscard]] std::uint64_t size() const override {
    const std::lock_guard lock(mutex_);
    return bytes_.size();
  }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    const std::lock_guard lock(mutex_);
    std::copy_n(bytes_.begin() + static_cast<std::ptrdiff_t>(offset), out.size(), out.begin());
  }
  void write_at(std::uint64_t offset, ByteView bytes) {
    const std::lock_guard lock(mutex_);
    bytes_.resize(std::max<std::size_t>(bytes_.size(), offset + bytes.size()));
    std::ranges::copy(bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
  }
  [[nodiscard]] const std::string& name() const override { return path_; }

 private:
  const std::string path_;
  mutable ShortMutex mutex_;
  std::vector<std::byte> bytes_;  // guarded by mutex_
};

class SharedSink final : public ByteSink {
 public:
  explicit SharedSink(std::shared_ptr<GrowingObject> object) : object_(std::move(object)) {}

  void write_at(std::uint64_t offset, ByteView bytes) override {
    require_open();
    object_->write_at(offset, bytes);
  }
  void commit() override {
    require_open();
    is_open_ = false;
  }
  [[nodiscard]] const std::string& name() const override { return object_->name(); }

 private:
  void require_open() const {
    if (is_open_) return;
    throw Error(ErrorCode::invalid_argument, "the object is closed already").at_path(name());
  }

  std::shared_ptr<GrowingObject> object_;
  bool is_open_ = true;
};

// What is called `from`/... in the map gets names that begin with `to`/.
class NewMemoryDirectory final : public NewDirectory {
 public:
  NewMemoryDirectory(std::shared_ptr<Objects> objects, std::string root, std::string name,
                     IfExists if_exists)
      : objects_(std::move(objects)),
        path_(std::move(root) + "/" + name),
        name_(std::move(name)),
        working_(name_ + std::string(kWorkMark) + random_attempt()),
        if_exists_(if_exists) {
    const std::lock_guard lock(objects_->mutex);
    require_room();
  }
  ~NewMemoryDirectory() override {
    const std::lock_guard lock(objects_->mutex);
    (void)take(working_);
  }

  [[nodiscard]] const std::string& working() const override { return working_; }
  void commit(const IsReplaced& is_replaced) override {
    const std::lock_guard lock(objects_->mutex);
    require_room();
    Map old = take(name_);
    for (auto& [name, object] : take(working_))
      objects_->by_name[name_ + name.substr(working_.size())] = std::move(object);
    if (!is_replaced) return;
    for (auto& [name, object] : old) {
      if (!is_replaced(std::string_view(name).substr(name_.size() + 1)))
        objects_->by_name.emplace(name, std::move(object));
    }
  }

 private:
  using Map = std::map<std::string, std::shared_ptr<ByteSource>, std::less<>>;

  [[nodiscard]] bool is_below(const std::string& name, const std::string& directory) const {
    return name.starts_with(directory) && name[directory.size()] == '/';
  }
  // With the mutex, as all below.
  void require_room() const {
    const auto found = objects_->by_name.lower_bound(name_ + "/");
    const bool taken = objects_->by_name.contains(name_) ||
                       (if_exists_ == IfExists::fail && found != objects_->by_name.end() &&
                        is_below(found->first, name_));
    if (!taken) return;
    throw Error(ErrorCode::already_exists, "something of this name is there already")
        .at_path(path_);
  }
  // Removes and returns what is in the directory.
  Map take(const std::string& directory) {
    Map taken;
    auto entry = objects_->by_name.lower_bound(directory + "/");
    while (entry != objects_->by_name.end() && is_below(entry->first, directory)) {
      taken.insert(objects_->by_name.extract(entry));
      entry = objects_->by_name.lower_bound(directory + "/");
    }
    return taken;
  }

  const std::shared_ptr<Objects> objects_;
  const std::string path_;  // for errors
  const std::string name_;
  const std::string working_;
  const IfExists if_exists_;
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
      found.push_back({entry->first, entry->second->size(), entry->second->version()});
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
    return sink(std::string(name), [if_exists, path = full(name)](const ByteSource* there) {
      if (if_exists == IfExists::fail && there != nullptr) refuse_existing(path);
    });
  }

  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t /*size_hint*/) override {
    require_safe_name(name, name_);
    return sink(std::string(name), [expected = std::string(expected),
                                    path = full(name)](const ByteSource* there) {
      if (there != nullptr && there->version() == expected) return;
      throw Error(ErrorCode::conflict, "another writer has replaced or removed the object")
          .at_path(path);
    });
  }

  [[nodiscard]] bool has_directories() const override { return true; }
  [[nodiscard]] std::unique_ptr<ByteSink> share(std::string_view name) override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    std::shared_ptr<ByteSource>& object = objects_->by_name[std::string(name)];
    if (!object) object = std::make_shared<GrowingObject>(full(name));
    auto growing = std::dynamic_pointer_cast<GrowingObject>(object);
    if (!growing) refuse_existing(full(name));
    return std::make_unique<SharedSink>(std::move(growing));
  }

  [[nodiscard]] std::unique_ptr<NewDirectory> new_directory(std::string_view name,
                                                            IfExists if_exists) override {
    require_safe_name(name, name_);
    return std::make_unique<NewMemoryDirectory>(objects_, name_, std::string(name), if_exists);
  }

  void remove(std::string_view name) override {
    require_safe_name(name, name_);
    const std::lock_guard lock(objects_->mutex);
    const auto found = objects_->by_name.find(name);
    if (found != objects_->by_name.end()) objects_->by_name.erase(found);
  }

 private:
  // `judge` is asked in one step with the commit, about the object that is there by then.
  [[nodiscard]] std::unique_ptr<ByteSink> sink(std::string name,
                                               std::function<void(const ByteSource*)> judge) const {
    const std::string path = full(name);
    return memory_sink(path, [objects = objects_, key = std::move(name), path,
                              judge = std::move(judge)](std::vector<std::byte> bytes) {
      const std::lock_guard lock(objects->mutex);
      const auto found = objects->by_name.find(key);
      judge(found == objects->by_name.end() ? nullptr : found->second.get());
      objects->by_name[key] =
          std::make_shared<WholeObject>(std::move(bytes), path, ++objects->written);
    });
  }
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
