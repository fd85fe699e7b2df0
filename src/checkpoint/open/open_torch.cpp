// Files of torch.save, and archives of TorchScript and of torch.export
// (docs/formats/torch-save.md).
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/numbers.h"
#include "checkpoint/open/directory.h"
#include "checkpoint/open/open.h"
#include "format/exported/exported.h"
#include "format/pickle/pickle.h"
#include "format/sharded/sharded.h"
#include "format/torch/modules.h"
#include "format/torch/torch_file.h"
#include "format/zip/zip.h"
#include "io/source.h"
#include "storage/lazy_source.h"
#include "tessera/error.h"
#include "value/render.h"

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

// Of a zip, what follows its end.
std::uint64_t bytes_behind(const ByteSource& file) {
  const auto head = head_of<4>(file);
  if (load_le<std::uint32_t>(reinterpret_cast<const std::byte*>(head.data())) != zip::kLocalHeader)
    return 0;
  const std::optional<zip::LastEnd> last = zip::last_end(file);
  return last ? file.size() - last->end : 0;
}

Value read_as_asked(const std::shared_ptr<const ByteSource>& file, const OpenOptions& options,
                    std::vector<std::string>& warnings) {
  try {
    return options.raw ? torch_file::read(file) : read_replaced(file, warnings);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::corrupt || bytes_behind(*file) == 0) throw;
    throw reworded(error, error.message() + "; --accept trailing-bytes passes over them");
  }
}

}  // namespace

std::shared_ptr<const ByteSource> without_tail(std::shared_ptr<const LazySource> file,
                                               const OpenOptions& options, Checkpoint& checkpoint) {
  if (!accepts(options, kTrailingBytes)) return file;
  const std::uint64_t behind = bytes_behind(*file);
  if (behind == 0) return file;
  const ObjectInfo& info = file->object();
  remark(
      {{info.name, FileState::used,
        std::to_string(behind) + " bytes after the end of the archive are passed over", info.size}},
      checkpoint);
  return slice_source(std::move(file), 0, info.size - behind);
}

Value read_torch_tree(const std::shared_ptr<const ByteSource>& file, const std::string& path,
                      const OpenOptions& options, std::vector<std::string>& warnings) {
  Value tree = read_as_asked(file, options, warnings);
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

namespace {

template <class Read>
void take(CheckpointKind kind, Read read, Checkpoint& checkpoint) {
  checkpoint.kind = kind;
  checkpoint.root = std::move(read.tree);
  for (std::string& note : read.notes) checkpoint.warnings.push_back(std::move(note));
}

// The tree of a file of torch.save or, where that is none, of an archive of TorchScript or of
// torch.export.
void read_torch(const std::shared_ptr<const ByteSource>& file, const OpenOptions& options,
                Checkpoint& checkpoint) {
  try {
    checkpoint.root = read_torch_tree(file, checkpoint.path, options, checkpoint.warnings);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) throw;
    if (auto script = torch_file::read_script(file)) {
      take(CheckpointKind::torchscript, *std::move(script), checkpoint);
    } else if (auto models = exported::read(file)) {
      take(CheckpointKind::exported, *std::move(models), checkpoint);
    } else {
      throw;
    }
  }
}

}  // namespace

Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file,
                      const OpenOptions& options) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name() + "/" + file.name;
  checkpoint.files = {file};
  read_torch(without_tail(std::make_shared<LazySource>(store, file), options, checkpoint), options,
             checkpoint);
  checkpoint.leaves = leaves_of(*checkpoint.root);
  checkpoint.has_types = true;
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

}  // namespace tessera
