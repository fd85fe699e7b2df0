#include "checkpoint/open/open.h"
#include "format/pickle/pickle.h"
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

namespace {

void replace_modules(Value& tree, std::vector<std::string>& warnings) {
  for (std::string& line : torch_file::replace_modules(tree)) warnings.push_back(std::move(line));
}

// What torch.compile leaves beside its module would run code where it is unpickled: it is read only
// to be left out with the module.
Value read_replaced(const std::shared_ptr<const ByteSource>& file,
                    std::vector<std::string>& warnings) {
  Value tree;
  try {
    tree = torch_file::read(file);
    replace_modules(tree, warnings);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsafe) throw;
    torch_file::ReadOptions options;
    options.keeps_compiler = true;
    tree = torch_file::read(file, options);
    replace_modules(tree, warnings);
    pickle::require_harmless(tree);
  }
  return tree;
}

}  // namespace

Value read_torch_tree(const std::shared_ptr<const ByteSource>& file, const std::string& path,
                      const OpenOptions& options, std::vector<std::string>& warnings) {
  Value tree = options.raw ? torch_file::read(file) : read_replaced(file, warnings);
  if (options.part) {
    sharded::keep_local(tree);
  } else {
    require_whole(tree, path);
  }
  return tree;
}

Checkpoint open_as_pickled(const Location& where, OpenOptions options) {
  try {
    options.raw = true;
    return Checkpoint::open(where, options);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsafe) throw;
  }
  options.raw = false;
  return Checkpoint::open(where, options);
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
