#include "checkpointer/places.h"

#include "tessera/cached_store.h"

namespace tessera::detail {

Location inside(const Location& where, const std::string& name) {
  if (!where.store) return where.path + "/" + name;
  return {where.store, where.name.empty() ? name : where.name + "/" + name};
}

Location seen_through(const Location& where, const std::optional<Location>& cache) {
  return cache ? Location(cached_store(where, *cache)) : where;
}

}  // namespace tessera::detail
