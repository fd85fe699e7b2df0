#include "checkpoint/open/located.h"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "base/parallel.h"
#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/indexed_set.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/open.h"
#include "checkpoint/read/side_file.h"
#include "format/safetensors/index.h"
#include "io/source.h"
#include "storage/arena/arenas.h"
#include "storage/cache/block_cache.h"
#include "storage/forwarding_store.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/error.h"

namespace tessera {
namespace {

bool names_store(const Location& where) {
  return !where.store && is_remote(where.path);
}

Location object_at(const std::string& url) {
  return {open_above(url), last_name(url)};
}

bool has_something(const Store& store) {
  return !store.list_level().empty() || !store.list_directories().empty();
}

// `parent` has the object `name`, unless `itself` is a directory.
Location located_on_web(std::shared_ptr<Store> parent, const std::string& name,
                        const std::shared_ptr<Store>& itself) {
  if (safetensors::is_index(name)) return {web_set_directory(std::move(parent), name), name};
  const bool is_file = !name.empty() && kind_of_file_name(name).has_value();
  auto directory = is_file ? nullptr : web_directory(itself);
  if (directory) return snapshot_store(std::move(directory), true);
  return {snapshot_store(std::move(parent), false), name};
}

}  // namespace

bool is_on_disk(const Location& where) {
  return !where.store && !is_remote(where.path);
}

Location located_directory(const Location& where) {
  if (where.store) return where;
  if (names_store(where)) return open_store(where.path);
  return without_file_scheme(where.path);
}

Location located_source(const Location& where) {
  if (!names_store(where)) return located_directory(where);
  const std::string name = last_name(where.path);
  auto itself = with_local_cache(open_store(where.path));
  const auto above = [&] { return with_local_cache(open_above(where.path)); };
  if (is_web(where.path)) return located_on_web(above(), name, itself);
  if (name.empty()) return snapshot_store(std::move(itself), true);
  const Location object(snapshot_store(above(), false), name);
  auto directory = snapshot_store(std::move(itself), true);
  if (!kind_of_file_name(name) && has_something(*directory)) return directory;
  if (object.store->exists(name)) return object;
  return directory;
}

Location located_target(const Location& where, std::string_view file) {
  if (!where.store && is_arena(where.path)) {
    throw Error(ErrorCode::unsupported, "a snapshot in memory is only read").at_path(where.path);
  }
  if (!names_store(where)) return located_directory(where);
  const std::string name = last_name(where.path);
  if (kind_of_file_name(name)) return object_at(where.path);
  const Location directory = located_directory(where);
  if (file.empty()) return directory;
  const bool is_object =
      !name.empty() && (is_read_only(where.path) || !has_something(*directory.store));
  return is_object ? object_at(where.path) : Location(directory.store, std::string(file));
}

std::optional<CheckpointKind> kind_of_target(const Location& target) {
  if (target.store) return kind_of_file_name(target.name);
  if (names_store(target)) return kind_of_file_name(last_name(target.path));
  const std::string path = without_file_scheme(target.path);
  return names_directory(path) ? std::nullopt : kind_of_file_name(path);
}

std::string followed_path(const std::string& path) {
  std::error_code none;
  const std::filesystem::path absolute = std::filesystem::absolute(without_file_scheme(path), none);
  const auto followed = std::filesystem::weakly_canonical(absolute, none);
  return (none ? absolute.lexically_normal() : followed).string();
}

bool names_directory(const std::filesystem::path& path) {
  std::error_code none;
  return is_one_of(path.filename(), "", ".", "..") || std::filesystem::is_directory(path, none);
}

Location located_file(const Location& where) {
  if (where.store) return where;
  if (names_store(where)) return object_at(where.path);
  const std::filesystem::path path = without_file_scheme(where.path);
  if (names_directory(path)) return posix_store(path.string());
  return {posix_store(path.parent_path().string()), path.filename().string()};
}

std::shared_ptr<Store> directory_store(const Location& where) {
  const Location located = located_directory(where);
  if (!located.store) return posix_store(located.path);
  if (located.name.empty()) return located.store;
  require_safe_name(located.name, located.store->name());
  return std::make_shared<SubStore>(located.store, located.name);
}

namespace {

constexpr int kAskedAtOnce = 16;

// Lists files of known names.
class NamedStore final : public ForwardingStore {
 public:
  NamedStore(std::shared_ptr<Store> server, std::vector<std::string> names)
      : ForwardingStore(std::move(server)), names_(std::move(names)) {
    std::ranges::sort(names_);
    names_.erase(std::unique(names_.begin(), names_.end()), names_.end());
  }

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    std::vector<ObjectInfo> found;
    const std::string below = prefix.empty() ? "" : std::string(prefix) + "/";
    for (const ObjectInfo& object : all())
      if (object.name.starts_with(below)) found.push_back(object);
    return found;
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return Store::list_level(prefix);  // NOLINT(bugprone-parent-virtual-call): of our list()
  }
  // Neither kind has any.
  [[nodiscard]] std::vector<std::string> list_directories(std::string_view /*in*/) const override {
    return {};
  }

 private:
  // Once.
  const std::vector<ObjectInfo>& all() const {
    const std::lock_guard lock(mutex_);
    if (is_known_) return objects_;
    std::vector<ObjectInfo> asked(names_.size());
    parallel_for(kAskedAtOnce, names_.size(), [&](std::size_t i) {
      if (const auto source = open_if_there(inner(), names_[i]))
        asked[i] = {names_[i], source->size(), source->version()};
    });
    std::erase_if(asked, [](const ObjectInfo& object) { return object.name.empty(); });
    const NoFork moment;
    objects_ = std::move(asked);
    is_known_ = true;
    return objects_;
  }

  std::vector<std::string> names_;
  mutable SlowMutex mutex_;
  mutable bool is_known_ = false;            // guarded by mutex_
  mutable std::vector<ObjectInfo> objects_;  // guarded by mutex_
};

}  // namespace

std::shared_ptr<Store> web_dcp_directory(std::shared_ptr<Store> server) {
  const dcp::Metadata metadata = read_dcp_metadata(*server);
  std::vector<std::string> names = {std::string(kDcpMetadata),
                                    side_file_name(save_id_of(*server, metadata))};
  for (const std::string& name : named_files(metadata)) names.push_back(name);
  return std::make_shared<NamedStore>(std::move(server), std::move(names));
}

std::shared_ptr<Store> web_set_directory(std::shared_ptr<Store> server, const std::string& index) {
  const auto text = read_all(*server->open(index), safetensors::kIndexLimit);
  std::vector<std::string> names = {index};
  for (const auto& [tensor, file] : safetensors::read_index(text).files) names.push_back(file);
  return std::make_shared<NamedStore>(std::move(server), std::move(names));
}

std::shared_ptr<Store> web_directory(const std::shared_ptr<Store>& server) {
  if (server->exists(kDcpMetadata)) return web_dcp_directory(server);
  for (const SetNames& set : {kSafetensorsSet, kTorchSet}) {
    const std::string index(set.usual_index);
    if (server->exists(index)) return web_set_directory(server, index);
  }
  return nullptr;
}

namespace {

bool opens(const std::string& path) {
  try {
    open_checkpoint(posix_store(path), {}).require_files();
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

std::string newest_beside(const std::string& link) {
  std::vector<StepName> steps;
  for (const DirectoryEntry& entry : readable_entries_of(directory_of(link))) {
    std::string_view rest = entry.name;
    const auto step = take_step_name(rest);
    if (step && rest.empty() && entry.is_directory) steps.push_back(*step);
  }
  // The sharded one of a step comes first, as for who asks a run for its latest.
  std::ranges::sort(steps, {},
                    [](const StepName& step) { return std::pair(-step.step, step.unsharded); });
  const auto newest = std::ranges::find_if(steps, [&](const StepName& step) {
    return opens(directory_of(link) + "/" + to_string(step));
  });
  return newest == steps.end() ? std::string() : to_string(*newest);
}

namespace {

constexpr std::uint64_t kSmall = 1U << 20U;  // bytes

// A small object, read whole at its first read.
class SmallSource final : public ForwardingSource {
 public:
  using ForwardingSource::ForwardingSource;

  [[nodiscard]] std::uint64_t request_cost() const override { return kNearRequest; }
  void read_ranges(std::span<const ReadRange> ranges) const override {
    ByteSource::read_ranges(ranges);  // NOLINT(bugprone-parent-virtual-call): by read_at
  }
  void read_at(std::uint64_t offset, MutableByteView out) const override {
    require_range(*this, offset, out.size());
    const std::lock_guard lock(mutex_);
    if (!bytes_) {
      std::vector<std::byte> bytes = read_all(inner(), kSmall);
      const NoFork moment;
      bytes_ = std::move(bytes);
    }
    if (!out.empty()) std::memcpy(out.data(), bytes_->data() + offset, out.size());
  }

 private:
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

 private:
  void before_change() override {
    const std::lock_guard lock(mutex_);
    const NoFork moment;
    lists_of_all_.clear();
    levels_.clear();
    opened_.clear();
  }

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
        source = open_if_there(inner(), name);
      } else if (const ObjectInfo* object = listed(name)) {
        source = inner().open_listed(*object);
      }
      const bool is_small = source && source->size() <= kSmall;
      return is_small ? std::make_shared<SmallSource>(std::move(source)) : source;
    });
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
