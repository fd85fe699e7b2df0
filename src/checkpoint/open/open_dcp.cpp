#include "checkpoint/dcp/metadata_file.h"
#include "checkpoint/dcp/read_catalog.h"
#include "checkpoint/open/open.h"
#include "checkpoint/open/opened_dcp.h"

namespace tessera {

std::shared_ptr<Store> store_of_directory(const Location& where) {
  return where.store ? where.store : posix_store(where.path);
}

std::shared_ptr<Store> dcp_directory(const Location& where) {
  if (!where.name.empty()) return nullptr;
  std::shared_ptr<Store> store = store_of_directory(where);
  return store->exists(kDcpMetadata) ? store : nullptr;
}

Checkpoint open_dcp(std::shared_ptr<Store> store) {
  const Bytes catalog = read_catalog(store);
  OpenedDcp opened(catalog, std::move(store));
  opened.give_all();
  return std::move(opened.checkpoint());
}

}  // namespace tessera
