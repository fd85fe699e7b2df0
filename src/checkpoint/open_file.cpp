// Single files and directories of safetensors.
#include <map>

#include "checkpoint/lazy_source.h"
#include "checkpoint/open.h"
#include "checkpoint/seal.h"
#include "checkpoint/value_json.h"
#include "format/safetensors/safetensors.h"
#include "format/torch/torch_file.h"
#include "tessera/error.h"

namespace tessera {
namespace {

Leaf tensor_leaf(const safetensors::Entry& entry, std::uint64_t data_offset,
                 const std::shared_ptr<const ByteSource>& source) {
  auto storage = std::make_shared<Storage>();
  storage->source = source;
  storage->offset = data_offset + entry.begin;
  storage->size = entry.end - entry.begin;
  storage->dtype = entry.dtype;
  Tensor tensor;
  tensor.dtype = entry.dtype;
  tensor.shape = entry.shape;
  tensor.pieces.push_back(Piece{whole(entry.shape), std::move(storage), 0, {}, -1});
  return {entry.name, Path{entry.name}, Value(std::move(tensor))};
}

}  // namespace

Checkpoint open_torch(std::shared_ptr<Store> store, const ObjectInfo& file) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::torch_file;
  checkpoint.path = store->name() + "/" + file.name;
  checkpoint.files = {file};
  checkpoint.root = torch_file::read(std::make_shared<LazySource>(store, file));
  checkpoint.leaves = flatten(*checkpoint.root);
  checkpoint.store = std::move(store);
  require_coverage(checkpoint);
  return checkpoint;
}

Checkpoint open_safetensors(std::shared_ptr<Store> store, const std::vector<ObjectInfo>& files) {
  Checkpoint checkpoint;
  checkpoint.kind = CheckpointKind::safetensors;
  checkpoint.path = store->name();
  checkpoint.files = files;
  std::map<std::string, std::string> seen;  // tensor name -> file
  for (const ObjectInfo& file : files) {
    const auto whole_file = std::make_shared<LazySource>(store, file);
    const safetensors::Header header = safetensors::read_header(*whole_file);
    const auto source = guard_safetensors(whole_file, header);
    for (const safetensors::Entry& entry : header.entries) {
      const auto [other, fresh] = seen.emplace(entry.name, file.name);
      if (!fresh) {
        throw Error(ErrorCode::conflict,
                    "the tensor is in " + other->second + " and in " + file.name)
            .at_path(store->name())
            .at_key(entry.name);
      }
      checkpoint.leaves.push_back(tensor_leaf(entry, header.data_offset, source));
    }
    try {
      add_from_metadata(header.metadata, checkpoint.leaves);
    } catch (Error& error) {
      throw error.at_path(source->name());
    }
  }
  checkpoint.store = std::move(store);
  return checkpoint;
}

}  // namespace tessera
