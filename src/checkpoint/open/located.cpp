#include "checkpoint/open/located.h"

#include <filesystem>
#include <system_error>
#include <utility>

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

// `parent` has the object `name`, unless `itself` is a directory.
Location located_on_web(std::shared_ptr<Store> parent, const std::string& name,
                        const std::shared_ptr<Store>& itself) {
  if (name.ends_with(safetensors::kIndexSuffix))
    return {web_set_directory(std::move(parent), name), name};
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
  const auto is_directory = [&] {
    return !directory->list_level().empty() || !directory->list_directories().empty();
  };
  if (!kind_of_file_name(name) && is_directory()) return directory;
  if (object.store->exists(name)) return object;
  return directory;
}

Location located_target(const Location& where) {
  if (names_store(where) && kind_of_file_name(last_name(where.path))) return object_at(where.path);
  return located_directory(where);
}

Location located_file(const Location& where) {
  if (where.store) return where;
  if (names_store(where)) return object_at(where.path);
  const std::filesystem::path path = without_file_scheme(where.path);
  std::error_code none;
  if (path.filename().empty() || std::filesystem::is_directory(path, none))
    return posix_store(path.string());
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
