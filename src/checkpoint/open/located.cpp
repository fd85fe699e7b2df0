#include "checkpoint/open/located.h"

#include <filesystem>
#include <system_error>
#include <utility>

#include "base/one_of.h"
#include "checkpoint/open/kinds.h"
#include "checkpoint/open/snapshot_store.h"
#include "checkpoint/open/web_directory.h"
#include "format/safetensors/index.h"
#include "storage/cache/caching_store.h"
#include "storage/names.h"
#include "storage/open_store.h"
#include "storage/sub_store.h"
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
  if (!names_store(where)) return located_directory(where);
  const std::string name = last_name(where.path);
  if (kind_of_file_name(name)) return object_at(where.path);
  const Location directory = located_directory(where);
  if (file.empty()) return directory;
  const bool is_object = !name.empty() && (is_web(where.path) || !has_something(*directory.store));
  return is_object ? object_at(where.path) : Location(directory.store, std::string(file));
}

std::optional<CheckpointKind> kind_of_target(const Location& target) {
  if (target.store) return kind_of_file_name(target.name);
  if (names_store(target)) return kind_of_file_name(last_name(target.path));
  const std::string path = without_file_scheme(target.path);
  return names_directory(path) ? std::nullopt : kind_of_file_name(path);
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

}  // namespace tessera
