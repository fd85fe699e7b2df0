#include "checkpoint/save/leftovers.h"

#include <optional>
#include <set>
#include <string>

#include "checkpoint/dcp/guard_dcp.h"
#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/digests/side_file.h"

namespace tessera {

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
