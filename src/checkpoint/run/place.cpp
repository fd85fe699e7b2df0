#include <filesystem>

#include "checkpoint/open/located.h"
#include "storage/names.h"
#include "storage/sub_store.h"
#include "tessera/run_directory.h"

namespace tessera {

// In a URL it is a URL, so that whoever is told where a checkpoint is can use that.
Location directory_in(const Location& where, const std::string& name) {
  if (is_on_disk(where))
    return (std::filesystem::path(located_directory(where).path) / name).string();
  if (!where.store) return where.path + (where.path.ends_with('/') ? "" : "/") + name;
  const std::shared_ptr<Store> above = directory_store(where);
  require_safe_name(name, above->name());
  return std::make_shared<SubStore>(above, name);
}

}  // namespace tessera
