#include "checkpoint/leftovers.h"

#include <algorithm>
#include <set>
#include <string>

#include "checkpoint/open.h"

namespace tessera {
namespace {

std::set<std::string> named_files(const dcp::Metadata& metadata) {
  std::set<std::string> named;
  for (const dcp::Entry& entry : metadata.entries) {
    named.insert(entry.item.path);
    for (const dcp::Chunk& chunk : entry.chunks) named.insert(chunk.item.path);
  }
  return named;
}

// `__{rank}_{n}_{attempt}.distcp`: torch's names lack the attempt.
bool is_ours(const std::string& name) {
  return std::count(name.begin(), name.end(), '_') == 4;
}

}  // namespace

void remove_leftovers(Store& store) {
  store.remove_unfinished();
  const bool present = store.exists(kDcpMetadata);
  const std::set<std::string> named =
      present ? named_files(read_dcp_metadata(store)) : std::set<std::string>();
  for (const ObjectInfo& object : store.list()) {
    if (!object.name.starts_with("__") || !object.name.ends_with(".distcp")) continue;
    if (!named.contains(object.name) && (present || is_ours(object.name)))
      store.remove(object.name);
  }
}

}  // namespace tessera
