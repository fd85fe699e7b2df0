#include "tessera/run_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "base/process.h"
#include "base/text.h"
#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/located.h"
#include "checkpoint/open/under_way.h"
#include "checkpoint/save/place.h"
#include "storage/forwarding_store.h"
#include "storage/posix/atomic_file.h"
#include "storage/posix/lock.h"
#include "storage/posix/replaced_directory.h"
#include "storage/posix/system.h"
#include "storage/storage.h"
#include "tessera/checkpoint.h"
#include "tessera/error.h"
#include "tessera/storage.h"

namespace tessera {
namespace {

using std::chrono::seconds;
using Time = std::chrono::system_clock::time_point;

// Whether a directory is a part of one that is not finished: there only its writer knows what is
// left over.
bool is_in_work(const std::string& directory) {
  return std::ranges::any_of(std::filesystem::path(directory), [](const auto& part) {
    return is_working_name(part.native()) || is_resumable_name(part.native());
  });
}

// What a save was killed in before it had written anything.
bool is_step_name(std::string_view name) {
  return take_step_name(name).has_value() && name.empty();
}

std::string lock_of_work(const std::string& directory) {
  return directory + "/" + std::string(kWorkLock);
}

// Whether a directory of a writer's name holds nothing but what writers make: files of a
// checkpoint, by their names, and probes. A user's directory may have the name, too.
bool is_of_a_writer(const std::string& path) {
  if (!entries_if_open(path)) return false;
  const auto store = posix_store(path);  // which passes over temporary names
  const Belonging belongs(*store);
  return std::ranges::all_of(store->list(), [&](const ObjectInfo& object) {
    const std::string_view name = object.name;
    return belongs(name) || is_probe_name(name.substr(name.rfind('/') + 1));
  });
}

// Where writer processes met that were killed.
bool is_meeting(std::string_view directory, const std::vector<ObjectInfo>& files) {
  return is_meeting_name(directory.substr(directory.rfind('/') + 1)) &&
         std::ranges::all_of(files,
                             [](const ObjectInfo& file) { return is_meeting_object(file.name); });
}

bool is_meeting(const std::string& path) {
  return is_meeting_name(path.substr(path.rfind('/') + 1)) && entries_if_open(path) &&
         is_meeting(path, posix_store(path)->list());
}

struct Extent {
  std::uint64_t bytes = 0;
  Time last;
};

// The extent grows by a file or link, or by a directory with all that is in it.
void add_extent(const std::string& path, Extent& extent) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return;
  extent.last =
      std::max(extent.last, std::chrono::system_clock::from_time_t(status.st_mtim.tv_sec));
  if (S_ISREG(status.st_mode)) extent.bytes += static_cast<std::uint64_t>(status.st_size);
  if (!S_ISDIR(status.st_mode)) return;
  for (const DirectoryEntry& entry : readable_entries_of(path)) add_extent(entry.path, extent);
}

Leftover leftover_at(const std::string& path, LeftoverKind kind, Time now) {
  Extent extent;
  add_extent(path, extent);
  return {.kind = kind,
          .path = path,
          .bytes = extent.bytes,
          .age = std::chrono::duration_cast<std::chrono::seconds>(now - extent.last)};
}

// What a leftover on a disk is, which says how it is locked and removed.
enum class Form : std::uint8_t { file, working, resumable, empty };

struct OnDisk {
  Leftover leftover;
  Form form = Form::file;
};

struct DiskLeftovers {
  std::vector<OnDisk> found;             // with their ages
  std::vector<std::string> directories;  // others, the given one among them
};

class Search {
 public:
  explicit Search(Time now) : now_(now) {}

  void look_in(const std::string& directory, const std::vector<DirectoryEntry>& entries) {
    result_.directories.push_back(directory);
    for (const DirectoryEntry& entry : entries) {
      if (entry.is_directory) {
        look_at(entry);
      } else if (is_temporary_name(entry.name)) {
        add(entry.path, Form::file);
      }
    }
  }

  void look_beside(const std::filesystem::path& directory) {
    const std::string name = directory.filename().string();
    if (name.empty() || name == "." || name == "..") return;
    const std::string resumed = "." + name + std::string(kResumeMark);
    for (const DirectoryEntry& entry : readable_entries_of(directory_of(directory))) {
      if (entry.is_directory && (is_working_name(entry.name, name) || entry.name == resumed))
        (void)add_work(entry);
    }
  }

  [[nodiscard]] DiskLeftovers take() { return std::move(result_); }

 private:
  void look_at(const DirectoryEntry& directory) {
    if (add_work(directory)) return;
    const auto below = entries_if_open(directory.path);
    if (!below) return;  // what is closed to us we have not written
    if (below->empty() && is_step_name(directory.name)) return add(directory.path, Form::empty);
    look_in(directory.path, *below);
  }

  // A directory that a writer made for its work has something in it that says so.
  bool add_work(const DirectoryEntry& directory) {
    if (is_resumable_name(directory.name) && is_work_directory(directory.path)) {
      add(directory.path, Form::resumable);
    } else if ((is_working_name(directory.name) && is_of_a_writer(directory.path)) ||
               is_meeting(directory.path)) {
      add(directory.path, Form::working);
    } else {
      return false;
    }
    return true;
  }

  void add(const std::string& path, Form form) {
    const LeftoverKind kind = form == Form::file ? LeftoverKind::file : LeftoverKind::directory;
    result_.found.push_back({leftover_at(path, kind, now_), form});
  }

  const Time now_;
  DiskLeftovers result_;
};

// In the directory, below it, and directories beside it that were to become it. Links are not
// followed. Throws `not_found` if there is no such directory.
DiskLeftovers disk_leftovers(const std::string& directory, Time now) {
  std::error_code error;
  if (!std::filesystem::is_directory(directory, error)) {
    throw Error(ErrorCode::not_found, "there is no such directory").at_path(directory);
  }
  Search search(now);
  search.look_in(directory, entries_of(directory));
  search.look_beside(directory);
  return search.take();
}

Time now() {
  return std::chrono::system_clock::now();
}

seconds age_of(Time written) {
  return std::chrono::duration_cast<seconds>(now() - written);
}

class Collection {
 public:
  explicit Collection(const GcOptions& options) : options_(options) {
    if (options.older_than < seconds(0))
      throw Error(ErrorCode::invalid_argument, "an age below zero");
  }

  // Takes a leftover, or spares it. `remove` returns false if its writer lives, and throws why it
  // cannot be removed.
  void take(Leftover leftover, const std::function<bool()>& remove) {
    if (!is_old(leftover)) return spare();
    if (options_.remove) {
      try {
        if (!remove()) return spare();
        leftover.removed = true;
      } catch (const Error& error) {
        leftover.problem = error.what();
      }
    }
    report_.leftovers.push_back(std::move(leftover));
  }
  void spare() { ++report_.spared; }
  void fail(const std::string& directory, const Error& error) {
    report_.leftovers.push_back(
        {.kind = LeftoverKind::directory, .path = directory, .problem = error.what()});
  }

  // The age alone protects it where nobody can tell whether a writer lives, and is an hour or more.
  [[nodiscard]] bool may_take(Locked locked) const {
    return locked == Locked::yes ||
           (locked == Locked::unknown && options_.older_than >= std::chrono::hours(1));
  }
  [[nodiscard]] bool removes() const { return options_.remove; }
  [[nodiscard]] Time before() const { return now() - options_.older_than; }
  [[nodiscard]] GcReport report() {
    std::ranges::sort(report_.leftovers, {}, &Leftover::path);
    return std::move(report_);
  }

 private:
  [[nodiscard]] bool is_old(const Leftover& leftover) const {
    if (!leftover.age) return options_.older_than == seconds(0);
    return *leftover.age >= options_.older_than;
  }

  const GcOptions& options_;
  GcReport report_;
};

// A DCP directory as it will be without its leftovers.
class WithoutLeftovers final : public ForwardingStore {
 public:
  WithoutLeftovers(std::shared_ptr<Store> store, const std::vector<std::string>& leftovers)
      : ForwardingStore(std::move(store)), hidden_(leftovers.begin(), leftovers.end()) {}

  [[nodiscard]] std::vector<ObjectInfo> list(std::string_view prefix) const override {
    return without_hidden(ForwardingStore::list(prefix));
  }
  [[nodiscard]] std::vector<ObjectInfo> list_level(std::string_view prefix) const override {
    return without_hidden(ForwardingStore::list_level(prefix));
  }
  [[nodiscard]] bool exists(std::string_view name) const override {
    return !hidden_.contains(name) && ForwardingStore::exists(name);
  }
  [[nodiscard]] std::shared_ptr<ByteSource> open(std::string_view name) const override {
    if (hidden_.contains(name)) {
      throw Error(ErrorCode::not_found, "the checkpoint needs what looks left over")
          .at_path(this->name() + "/" + std::string(name));
    }
    return ForwardingStore::open(name);
  }

 private:
  [[nodiscard]] std::vector<ObjectInfo> without_hidden(std::vector<ObjectInfo> objects) const {
    std::erase_if(objects,
                  [this](const ObjectInfo& object) { return hidden_.contains(object.name); });
    return objects;
  }

  std::set<std::string, std::less<>> hidden_;
};

// The names of what may go. The checkpoint that is there, if one is, has to open without them: what
// cannot be opened is no place to remove anything from.
std::vector<std::string> proven_leftovers(const std::shared_ptr<Store>& store) {
  std::vector<std::string> leftovers = leftovers_in(*store, present_in(*store));
  if (leftovers.empty()) return leftovers;
  const std::shared_ptr<Store> left = std::make_shared<WithoutLeftovers>(store, leftovers);
  if (!own_files(*left, left->list_level()).empty())
    Checkpoint::open(Location(left)).require_files();
  return leftovers;
}

// The leftovers of a DCP directory. What its `.metadata` does not name is as old as that at most.
void collect_dcp(const std::shared_ptr<Store>& store, Collection& collection) {
  std::unique_ptr<StoreHold> hold;
  if (collection.removes()) hold = store->hold();
  const std::vector<std::string> leftovers = proven_leftovers(store);
  if (leftovers.empty()) return;
  // Behind the look into `.metadata`: where nobody can hold the directory, it may have been
  // replaced since the look before.
  std::map<std::string, ObjectInfo, std::less<>> objects;
  for (const ObjectInfo& object : store->list_level()) objects.emplace(object.name, object);
  const auto metadata = objects.find(kDcpMetadata);
  for (const std::string& name : leftovers) {
    const auto found = objects.find(name);
    if (found == objects.end()) continue;
    std::optional<Time> written = found->second.written;
    if (written && metadata != objects.end() && metadata->second.written)
      written = std::max(*written, *metadata->second.written);
    collection.take({.path = store->name() + "/" + name,
                     .bytes = found->second.size,
                     .age = written ? std::optional(age_of(*written)) : std::nullopt},
                    [&] {
                      store->remove(name);
                      return true;
                    });
  }
}

// Nothing of a directory that a writer holds is touched. One with a damaged checkpoint does not
// keep the rest.
void collect_unless_held(const std::shared_ptr<Store>& store, Collection& collection) {
  try {
    collect_dcp(store, collection);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::conflict) return collection.spare();
    collection.fail(store->name(), error);
  }
}

bool may_be_dcp(const std::vector<ObjectInfo>& files) {
  return std::ranges::any_of(files, [](const ObjectInfo& file) {
    return file.name == kDcpMetadata || file.name.starts_with("__") ||
           file.name.starts_with("tessera-");
  });
}

// What cannot be asked is listed with the reason.
bool may_list(OnDisk& found, const Collection& collection) {
  try {
    const std::string& path = found.leftover.path;
    return collection.may_take(is_free(found.form == Form::resumable ? lock_of_work(path) : path));
  } catch (const Error& error) {
    found.leftover.problem = error.what();
    return true;
  }
}

// Who works in it has its lock.
bool remove_resumable(const std::string& path) {
  try {
    WorkDirectory(path).remove();
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::conflict) return false;
    throw;
  }
}

// One that is not empty any more stays.
bool remove_empty(const std::string& path, const Collection& collection) {
  if (!collection.may_take(is_free(path))) return false;
  if (::rmdir(path.c_str()) == 0) return true;
  if (is_one_of(errno, ENOTEMPTY, EEXIST, ENOENT)) return false;
  throw_errno(errno, "remove directory", path);
}

bool remove_on_disk(const std::string& path, Form form, const Collection& collection) {
  if (form == Form::resumable) return remove_resumable(path);
  if (form == Form::empty) return remove_empty(path, collection);
  return remove_free(path, collection.may_take(Locked::unknown));
}

void collect_disk(const std::string& directory, Collection& collection) {
  DiskLeftovers leftovers = disk_leftovers(directory, now());
  for (OnDisk& found : leftovers.found) {
    if (!collection.removes() && !may_list(found, collection)) {
      collection.spare();
      continue;
    }
    const std::string path = found.leftover.path;
    collection.take(std::move(found.leftover),
                    [&] { return remove_on_disk(path, found.form, collection); });
  }
  for (const std::string& path : leftovers.directories) {
    const auto store = posix_store(path);
    if (!may_be_dcp(store->list_level())) continue;
    collect_unless_held(store, collection);
  }
}

// In a store that has no locks; what its ranks still need they change within minutes.
void collect_meeting(Store& store, const std::string& directory,
                     const std::vector<ObjectInfo>& files, Collection& collection) {
  Leftover found{.kind = LeftoverKind::directory, .path = store.name() + "/" + directory};
  for (const ObjectInfo& file : files) {
    found.bytes += file.size;
    if (!file.written) continue;
    const seconds age = age_of(*file.written);
    found.age = std::min(age, found.age.value_or(age));
  }
  collection.take(std::move(found), [&] {
    if (!collection.may_take(Locked::unknown)) return false;
    for (const ObjectInfo& file : files) store.remove(directory + "/" + file.name);
    return true;
  });
}

void collect_store(const std::shared_ptr<Store>& store, Collection& collection) {
  std::map<std::string, std::vector<ObjectInfo>> by_directory;
  for (const ObjectInfo& object : store->list()) {
    const std::size_t slash = object.name.rfind('/');
    const std::string directory = slash == std::string::npos ? "" : object.name.substr(0, slash);
    by_directory[directory].push_back(
        {object.name.substr(slash == std::string::npos ? 0 : slash + 1),
         object.size,
         {},
         object.written});
  }
  for (const auto& [directory, files] : by_directory) {
    if (is_meeting(directory, files)) collect_meeting(*store, directory, files, collection);
    if (is_in_work(directory) || !may_be_dcp(files)) continue;
    collect_unless_held(directory.empty() ? store : std::make_shared<SubStore>(store, directory),
                        collection);
  }
}

// Of what nobody can have left or could remove a list would say nothing.
void require_leftovers(const Store& store) {
  if (!store.is_read_only()) return;
  throw Error(ErrorCode::unsupported, "nothing is written there, so nothing is left over")
      .at_path(store.name());
}

// A name that only this library gives tells it, too: a kill may have come before the mark.
bool is_ours(const UnfinishedUpload& upload) {
  const std::string name = upload.path.substr(upload.path.rfind('/') + 1);
  return upload.is_ours || is_attempt_name(name) || is_probe_name(name);
}

}  // namespace

GcReport gc(const Location& target, const GcOptions& options) {
  Collection collection(options);
  if (is_on_disk(target)) {
    collect_disk(located_directory(target).path, collection);
  } else {
    const auto store = directory_store(target);
    require_leftovers(*store);
    collect_store(store, collection);
  }
  return collection.report();
}

GcReport gc_uploads(const Location& target, const GcOptions& options) {
  Collection collection(options);
  const auto store = directory_store(target);
  const auto uploads = store->uploads_begun_before(collection.before());
  if (!uploads) {
    throw Error(ErrorCode::unsupported, "only object stores have uploads: name s3://BUCKET/...")
        .at_path(to_string(target));
  }
  for (const UnfinishedUpload& upload : *uploads) {
    if (!is_ours(upload)) continue;
    collection.take({.kind = LeftoverKind::upload,
                     .path = upload.path,
                     .bytes = upload.bytes,
                     .age = age_of(upload.last)},
                    [&] {
                      upload.abort();
                      return true;
                    });
  }
  return collection.report();
}

}  // namespace tessera
