#include "tessera/storage.h"

#include "tessera/error.h"

namespace tessera {

bool Store::exists(std::string_view name) const {
  try {
    (void)open(name);
    return true;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::not_found) return false;
    throw;
  }
}

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
