#include "checkpoint/open/open.h"
#include "format/sharded/sharded.h"
#include "format/torch/modules.h"
#include "format/torch/torch_file.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"

namespace tessera {

void require_whole(const Value& tree, const std::string& path) {
  const std::optional<Shape> part = sharded::partly_held(tree);
  if (!part) return;
  throw Error(ErrorCode::incomplete, "one rank's part, of a tensor of " + to_string(*part) +
                                         " for example: open the directory with all ranks' files, "
                                         "or ask for this part alone (--part)")
      .at_path(path);
}

Value read_torch_tree(std::shared_ptr<const ByteSource> file, const std::string& path,
                      const OpenOptions& options, std::vector<std::string>& warnings) {
  Value tree = torch_file::read(std::move(file));
  if (!options.raw) {
    for (std::string& line : torch_file::replace_modules(tree)) warnings.push_back(std::move(line));
  }
  if (options.part) {
    sharded::keep_local(tree);
  } else {
    require_whole(tree, path);
  }
  return tree;
}

Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file,
                      const OpenOptions& options) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name() + "/" + file.name;
  checkpoint.files = {file};
  checkpoint.root = read_torch_tree(std::make_shared<LazySource>(store, file), checkpoint.path,
                                    options, checkpoint.warnings);
  checkpoint.leaves = leaves_of(*checkpoint.root);
  checkpoint.has_types = true;
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
