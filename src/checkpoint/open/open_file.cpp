#include "checkpoint/open/open.h"
#include "format/torch/torch_file.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"

namespace tessera {

Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name() + "/" + file.name;
  checkpoint.files = {file};
  checkpoint.root = torch_file::read(std::make_shared<LazySource>(store, file));
  checkpoint.leaves = leaves_of(*checkpoint.root);
  checkpoint.has_types = true;
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
