#include "tessera/storage.h"

namespace tessera {

std::vector<ObjectInfo> Store::list_level(std::string_view prefix) const {
  std::vector<ObjectInfo> found = list(prefix);
  const std::size_t below = prefix.empty() ? 0 : prefix.size() + 1;
  std::erase_if(found, [below](const ObjectInfo& object) {
    return object.name.find('/', below) != std::string::npos;
  });
  return found;
}

std::string to_string(const Location& where) {
  if (!where.store) return where.path;
  return where.name.empty() ? where.store->name() : where.store->name() + "/" + where.name;
}

}  // namespace tessera
