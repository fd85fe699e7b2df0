#include "checkpoint/save/leftovers.h"

#include <algorithm>
#include <optional>

#include "checkpoint/digests/guard.h"
#include "checkpoint/open/open.h"

namespace tessera {

std::set<std::string> named_files(const dcp::Metadata& metadata) {
  std::set<std::string> named;
  for (const dcp::Entry& entry : metadata.entries) {
    if (!entry.is_tensor) named.insert(entry.item.path);
    for (const dcp::Chunk& chunk : entry.chunks) named.insert(chunk.item.path);
  }
  return named;
}

bool is_attempt_name(std::string_view name) {
  return name.starts_with("__") && name.ends_with(".distcp") &&
         std::count(name.begin(), name.end(), '_') == 4;
}

void remove_leftovers(Store& store) {
  store.remove_unfinished();
  std::optional<std::set<std::string>> named;  // none: there is no `.metadata`
  std::string side_file;
  if (store.exists(kDcpMetadata)) {
    const dcp::Metadata metadata = read_dcp_metadata(store);
    named = named_files(metadata);
    side_file = side_file_name(save_id_of(store, metadata));
  }
  const auto is_leftover = [&](const std::string& name) {
    if (is_side_file_name(name)) return name != side_file;
    if (!name.starts_with("__") || !name.ends_with(".distcp")) return false;
    return named ? !named->contains(name) : is_attempt_name(name);
  };
  for (const ObjectInfo& object : store.list()) {
    if (is_leftover(object.name)) store.remove(object.name);
  }
}

}  // namespace tessera
