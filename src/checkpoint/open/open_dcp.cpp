#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/opened_dcp.h"

namespace tessera {

bool is_dcp_directory(const Place& place) {
  return !place.object && place.store->exists(kDcpMetadata);
}

Checkpoint open_dcp(std::shared_ptr<Store> store) {
  const Bytes catalog = read_catalog(store);
  OpenedDcp opened(catalog, std::move(store), true);
  opened.give_all();
  return std::move(opened.checkpoint());
}

}  // namespace tessera
