#include "checkpoint/open/snapshot_store.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/fork.h"
#include "checkpoint/digests/state_file.h"
#include "io/range.h"
#include "storage/forwarding_store.h"
#include "storage/names.h"
#include "tessera/error.h"

namespace tessera {
namespace {

constexpr std::uint64_t kSmall = 1U << 20U;  // bytes

// A small object, read whole at its first read.
class SmallSource final : public ByteSource {
 public:
  explicit SmallSource(std::shared_ptr<ByteSource> source) : source_(std::move(source)) {}

  [[nodiscard]] std::uint64_t size() const override { return source_->size(); }
  [[nodiscard]] const std::string& name() const override { return source_->name(); }
  [[nodiscard]] std::string version() const override { return source_->version(); }
  [[nodiscard]] bool checked() const override { return source_->checked(); }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    const std::lock_guard lock(mutex_);
    if (!bytes_) {
      std::vector<std::byte> bytes = read_all(*source_, kSmall);
      const NoFork moment;
      bytes_ = std::move(bytes);
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_->data() + offset, out.size());
  }

 private:
  const std::shared_ptr<ByteSource> source_;
  mutable SlowMutex mutex_;
  mutable std::optional<std::vector<std::byte>> bytes_;  // guarded by mutex_; null: not read yet
};

std::string directory_of(std::string_view name) {
  const std::size_t slash = name.rfind('/');
  return std::string(slash == std::string_view::npos ? std::string_view() : name.substr(0, slash));
}

template <typename T>
using ByName = std::map<std::string, T, std::less<>>;

class SnapshotStore final : public ForwardingStore {
 public:
  SnapshotStore(std::shared_ptr<Store> store, bool lists)
      : ForwardingStore(std::move(store)), lists_(lists) {}

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    const std::lock_guard lock(mutex_);
    return remembered(lists_of_all_, prefix, [&] {
      std::vector<ObjectInfo> objects = ForwardingStore::list(prefix);
      for (const ObjectInfo& object : objects) require_as_opened(object);
      return objects;
    });
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    const std::lock_guard lock(mutex_);
    return level(prefix);
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    if (name == kStateFile) return ForwardingStore::exists(name);
    require_safe_name(name, this->name());
    const std::lock_guard lock(mutex_);
    if (lists_) return listed(name) != nullptr;
    return opened(name) != nullptr;
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (name == kStateFile) return ForwardingStore::open(name);
    require_safe_name(name, this->name());
    const std::lock_guard lock(mutex_);
    if (auto source = opened(name)) return source;
    return ForwardingStore::open(name);  // its error, or what has come since
  }
  [[nodiscard]] std::unique_ptr<ByteSink> create(std::string_view name, IfExists if_exists,
                                                 std::uint64_t size_hint) override {
    forget();
    return ForwardingStore::create(name, if_exists, size_hint);
  }
  [[nodiscard]] std::unique_ptr<ByteSink> replace(std::string_view name, std::string_view expected,
                                                  std::uint64_t size_hint) override {
    forget();
    return ForwardingStore::replace(name, expected, size_hint);
  }
  void remove(std::string_view name) override {
    forget();
    ForwardingStore::remove(name);
  }

 private:
  // With the mutex, as all below.
  template <typename T, typename Ask>
  static const T& remembered(ByName<T>& by_name, std::string_view name, const Ask& ask) {
    const auto found = by_name.find(name);
    if (found != by_name.end()) return found->second;
    T answer = ask();
    const NoFork moment;
    return by_name.emplace(name, std::move(answer)).first->second;
  }

  const std::vector<ObjectInfo>& level(std::string_view prefix) const {
    return remembered(levels_, prefix, [&] { return ForwardingStore::list_level(prefix); });
  }

  const ObjectInfo* listed(std::string_view name) const {
    const std::vector<ObjectInfo>& objects = level(directory_of(name));
    const auto found = std::ranges::lower_bound(objects, name, {}, &ObjectInfo::name);
    return found != objects.end() && found->name == name ? &*found : nullptr;
  }

  // What was opened and what is listed after that are of one save.
  void require_as_opened(const ObjectInfo& object) const {
    const auto found = opened_.find(object.name);
    if (found == opened_.end() || !found->second || object.version.empty()) return;
    if (found->second->version() == object.version) return;
    throw Error(ErrorCode::conflict, "the object was replaced after it was opened")
        .at_path(found->second->name());
  }

  // Null: there is none.
  std::shared_ptr<ByteSource> opened(std::string_view name) const {
    return remembered(opened_, name, [&]() -> std::shared_ptr<ByteSource> {
      std::shared_ptr<ByteSource> source;
      if (!lists_) {
        source = open_if_there(name);
      } else if (const ObjectInfo* object = listed(name)) {
        source = inner().open_listed(*object);
      }
      const bool is_small = source && source->size() <= kSmall;
      return is_small ? std::make_shared<SmallSource>(std::move(source)) : source;
    });
  }

  std::shared_ptr<ByteSource> open_if_there(std::string_view name) const {
    try {
      return ForwardingStore::open(name);
    } catch (const Error& error) {
      if (error.code() != ErrorCode::not_found) throw;
      return nullptr;
    }
  }

  void forget() {
    const std::lock_guard lock(mutex_);
    const NoFork moment;
    lists_of_all_.clear();
    levels_.clear();
    opened_.clear();
  }

  const bool lists_;
  mutable SlowMutex mutex_;  // guards what follows
  mutable ByName<std::vector<ObjectInfo>> lists_of_all_, levels_;
  mutable ByName<std::shared_ptr<ByteSource>> opened_;  // null: there is none
};

}  // namespace

std::shared_ptr<Store> snapshot_store(std::shared_ptr<Store> store, bool lists) {
  return std::make_shared<SnapshotStore>(std::move(store), lists);
}

}  // namespace tessera
