#include "checkpoint/run/place.h"

#include <filesystem>

#include "storage/names.h"
#include "storage/posix/system.h"
#include "storage/sub_store.h"
#include "tessera/run_directory.h"

namespace tessera {

std::shared_ptr<Store> directory_store(const Location& where) {
  if (!where.store) return posix_store(where.path);
  if (where.name.empty()) return where.store;
  require_safe_name(where.name, where.store->name());
  return std::make_shared<SubStore>(where.store, where.name);
}

Location directory_in(const Location& where, const std::string& name) {
  if (!where.store) {
    require_local(where.path);
    return (std::filesystem::path(where.path) / name).string();
  }
  const std::shared_ptr<Store> above = directory_store(where);
  require_safe_name(name, above->name());
  return std::make_shared<SubStore>(above, name);
}

}  // namespace tessera
